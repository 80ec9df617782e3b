"""One algorithm in each folder, all of them on Catch; README.md lists them."""
