"""One folder per algorithm, all on Catch. README.md lists them."""
