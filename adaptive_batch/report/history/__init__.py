"""What the record of a run says, across restarts: which steps count, which rows they used, what changed."""
