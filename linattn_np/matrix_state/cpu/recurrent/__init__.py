"""The recurrent form in compiled loops: one token after the other."""
