"""The job of restoring: from a request to filled leaves, and the plan of it."""
