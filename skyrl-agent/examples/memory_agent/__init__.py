"""An agent that reads a text section by section and keeps a summary."""
