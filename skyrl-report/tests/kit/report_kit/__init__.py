"""Parts of the tests of skyrl_report."""
