"""The jobs `convert` and `reshard`: from files to files in bounded memory."""
