"""Run-time operators of pruning: selection, threshold, soft mask and N:M groups."""
