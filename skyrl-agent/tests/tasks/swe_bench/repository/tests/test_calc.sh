check test_old 1 1 1
