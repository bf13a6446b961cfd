"""`linattn fit`: next-value prediction of a series by a memory with learned gates, on held-out data."""
