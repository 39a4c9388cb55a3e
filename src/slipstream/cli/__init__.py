"""The command line: thin commands over the other rooms.

Owns: options, exit codes, how errors and results are printed.  Refuses: everything else's details.  Imports without
torch; a heavy room is imported only inside the command that needs it.

``main`` is the app; ``faults`` turns errors into exit codes; ``inputs`` reads files and ``key=value``; ``play`` runs
prompts through an engine without training; ``machine`` says what this machine can do.
"""
