"""The job of a delta: one training step as what changed since the step before. Experimental, as its layout is."""
