"""The finished code of the lessons: plain torch.distributed, and nothing of this course. It runs under torchrun as it is."""
