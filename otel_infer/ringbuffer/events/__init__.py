"""Events that a server or its sidecar records, and their layouts in shared memory.

There is one class per event, named noun + past verb. The writers (`ringbuffer.writer`,
`ringbuffer.batch_writer`) pack the layouts and the readers (`ringbuffer.reader`, `ringbuffer.step_reader`)
unpack them. Assembly consumes the events; no other module depends on a byte of them. `at` is always the
instant of the event (monotonic ns), and events are ordered by it.

There are two families:

* Request events belong to one request by its `handle`: a slot of the live table and its generation, u32; 0 =
  unknown. They occupy fixed 64-byte cells of the request ring.
* Step events describe one engine step and its whole batch. They occupy variable-length records of a step
  ring.
"""

from otel_infer.ringbuffer.events.codec import *
from otel_infer.ringbuffer.events.devices import *
from otel_infer.ringbuffer.events.event_types import *
from otel_infer.ringbuffer.events.exchanges import *
from otel_infer.ringbuffer.events.model_names import *
from otel_infer.ringbuffer.events.processes import *
from otel_infer.ringbuffer.events.requests import *
from otel_infer.ringbuffer.events.steps import *
