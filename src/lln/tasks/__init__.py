"""The experiments of the paper: pre-training, GLUE, images and long sequences, as runs that survive a crash."""
