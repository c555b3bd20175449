"""`python -m agent_r3.cli`, which is how the supervisor starts the other roles."""

from agent_r3.cli.main import main

if __name__ == "__main__":  # Megatron saves checkpoints from a process that imports this module again
    main()
