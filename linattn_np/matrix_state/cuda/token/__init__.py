"""Token by token: the recurrence of every cell in one kernel, and its gradients."""
