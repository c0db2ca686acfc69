"""Not torch: a stand-in that starts in milliseconds, so that cluster tests of the operator stay quick."""
