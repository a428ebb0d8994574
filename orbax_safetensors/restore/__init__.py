"""The restore job: from a request to filled leaves, and its plan."""
