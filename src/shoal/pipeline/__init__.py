"""One model over several devices: schedules as programs, stages, and how they run.

``shoal.pipeline.schedule`` loads without torch; ``shoal.pipeline.run`` trains.
"""
