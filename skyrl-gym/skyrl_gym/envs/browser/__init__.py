"""Pages in a browser on this machine: screenshots in, clicks and keys out."""
