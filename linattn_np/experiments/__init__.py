"""Commands: train and generate; compare, of trained mixers; bench, of speed; probe, by exact constructions."""
