"""Floor 2: the mathematics. Words shared by the rooms (kinds, decay, erase), and one room a recurrence."""
