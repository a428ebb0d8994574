"""Plans as numbers: what processes would read, write and exchange, counted without moving a byte."""
