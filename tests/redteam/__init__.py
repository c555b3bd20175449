"""Reward hacks against real gradings: what each does, that it works against a naive grader, and that it earns 0 here.

What is left to code that runs in pytest's own process, in principle:

- An object that equals everything, or a helper of the package for tests (`pandas._testing`) that asserts nothing, makes
  tests pass that use it; to pytest that is an honest pass.
- Code written for our launcher could find its plugin on the stack, take it out of pytest, and have it sign reports as
  they should be, those of the canaries too if it reads them from the hidden tests' folder and tells them apart. It has
  neither seen the launcher nor the canaries before (both are made for the run, the launcher is deleted before any code
  of the repository runs), and no grading tells an agent more than its reward.
- It could change how tests behave for some of them only and put everything back before the end.
- It could read the report's pipe empty, or use up memory or disk, so that the run counts as a failure of the
  infrastructure and not as a 0.
"""
