"""The demo: two workers chat through one daemon with little memory and a disk; one of them and the daemon are killed.

Conversations go from one worker to the other with every turn, so that each restores what the other stored. In the
middle one worker is killed (SIGKILL). At the end the daemon is killed and started again: its memory is gone, and the
last turns of the conversations are restored from disk. Every byte that comes back is compared.
"""
