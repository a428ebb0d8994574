"""The one loop that moves bytes between files and memory, and the plan that it executes."""
