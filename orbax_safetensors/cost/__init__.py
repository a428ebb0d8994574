"""Plans as numbers: what processes would read, write and exchange, counted before any byte moves."""
