"""One model over several devices: schedules as programs, stages, and how they run.

The schedules are here, and load without torch; ``shoal.pipeline.run`` trains.
"""

from shoal.pipeline.schedule import SCHEDULES, Pipeline, Schedule

__all__ = ["SCHEDULES", "Pipeline", "Schedule"]
