"""Here so that pytest puts this folder, where the package kvpool_demo lies, on the path."""
