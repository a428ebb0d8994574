"""The job of saving: from a tree to files and their index, and the plan of it."""
