"""The families that come with the package, one file each."""
