"""Steps on the GPU that may hang or end their process: each is announced before it runs, and begun once."""

from __future__ import annotations

from linear_lib import Report


class Steps(Report):
    """A report whose steps several processes take one after the other. The one in which a process was stopped is left
    out by the next, and so are later steps with its tile shapes, of two of them the one that no step had ended with."""

    def check(self, holds: bool, text: str) -> None:
        """Counts a check, and fails with the text unless it holds."""
        self.record["checks"] = self.record.get("checks", 0) + 1
        if not holds:
            self.fail(text)

    def begin(self, name: str, *shapes: str) -> bool:
        """Says what runs next, with which tile shapes. False: it is to be left out."""
        self.finish()
        step, begun = ", ".join((name, *shapes)), self.record.setdefault("begun", [])
        if step in begun or set(shapes) & set(self.record.get("broken", [])):
            return False
        begun.append(step)
        self.announce(step, shapes)
        return True

    def announce(self, step: str, shapes: tuple[str, ...] = ()) -> None:
        """Says what runs next, whether or not it was begun before."""
        self.finish()
        self.record["running"] = {"step": step, "shapes": shapes}
        self.save()
        self.say(step)

    def finish(self) -> None:
        """The step that runs is over."""
        if running := self.record.pop("running", None):
            works = self.record.setdefault("works", [])
            works += [shape for shape in running["shapes"] if shape not in works]

    def stop(self, why: str) -> bool:
        """Notes that a process was stopped in a step. False: in none, or in one where another was stopped before."""
        running = self.record.pop("running", None) or {"step": "before the first step", "shapes": ()}
        again = running["step"] in self.record.setdefault("stopped", []) or running["step"] == "before the first step"
        self.record["stopped"].append(running["step"])
        works = self.record.get("works", [])
        new = [shape for shape in running["shapes"] if shape not in works]
        self.record.setdefault("broken", []).extend(new or running["shapes"])
        self.fail(f"{running['step']}: {why}")
        self.save()
        return not again
