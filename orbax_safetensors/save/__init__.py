"""The save job: from a tree to files and their index, and its plan."""
