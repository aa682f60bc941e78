"""What a step will take, before it is trained: pure. A method lowers its step to tasks; the slowest worker decides."""
