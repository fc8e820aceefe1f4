"""Several ranks as one runtime: rank 0 schedules, samples and tells; the others follow its messages in order."""
