"""Extensions as a third party would write them: one file each, nothing of the package changed."""
