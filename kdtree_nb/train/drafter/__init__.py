"""The training of a DFlash drafter on text that its target wrote."""
