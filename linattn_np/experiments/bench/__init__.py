"""`linattn compare`: forms of linear attention, and softmax attention, on a real series: differences, time, memory."""
