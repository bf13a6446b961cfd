"""Read-outs that are more than q S: feature maps and averages, slots, solved systems; each calls the core."""
