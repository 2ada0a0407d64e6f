"""Names the first true cause of a failed start from the engine's output, or says that nothing failed.

`Scanner` reads line by line in constant memory; `diagnose` runs it over a whole log. Candidates for the cause are
ranked by what they say (a known cause before an exception before a wrapper), then by how deep they come from (worker,
engine core, API server, systemd), then by which came first; of a chain of exceptions the first counts. What is logged
at WARNING and below, whatever it quotes, is never a failure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from .log_text import API, CORE, NATIVE, SYSTEMD, Line, parse, split_lines
from .phases import KV_CACHE, ORDER, PROCESS, READY, WEIGHTS, Mark, mark_of
from .signatures import RANKS, Signature, Signatures, find, load_signatures

__all__ = ["Scanner", "Signatures", "diagnose", "load_signatures"]

CONTEXT_BEFORE, CONTEXT_AFTER = 5, 5
_CANDIDATES_KEPT = 64
_CACHE_KEPT = 2048
_CACHED_LENGTH = 400  # longer messages are rare, and would make the cache large
_SOURCES_KEPT = 256

# Ranks of what no signature names. A cause by signature has 100, see signatures.RANKS.
_RANK_SUSPECT = 90  # a cause that was only warned about, once something else shows that the start failed
_RANK_DETAIL = 85  # the line below "1 validation error for ..."
_RANK_EXCEPTION = 80
_RANK_LOGGED = 78  # the message that a logger prints before the traceback
_RANK_LATER = 74  # an exception raised while the first was handled
_RANK_VALIDATION = 72
_RANK_HANG = 70  # only asked for where nothing else is fatal
_RANK_MUTE = 56  # an exception without a word: whatever says more goes before
_RANK_FRAME = 45  # the innermost own line of a traceback whose end is missing
_RANK_ERROR = 35  # a line of level ERROR
_SOURCE_PENALTY = 5  # quoted source code says the same as the exception below it, less well

_EXCEPTION = re.compile(
    r"(?P<name>(?:[A-Za-z_][\w]*\.)*[A-Za-z_]\w*(?:Error|Exception|Failed|Failure|Exit|Interrupt|Timeout"
    r"|OutOfResources|NotFound|Expired|Mismatch|Unsupported|Invalid))(?:\([\w.]+\))?(?:: |:?\s*$)"
)
# A bare word may be anything that was cut off; an exception without a word of text has its module before its name.
_IN_TRACEBACK = re.compile(r"(?=\w+[.:(])(?P<name>[A-Za-z_][\w.]*)(?:\([\w.]+\))?(?:: |:?\s*$)")
_FRAME = re.compile(r"[\s|]*File [\"“]")
# Frames that only the handling of one request has; the server's own start (lifespan) runs through other functions.
_REQUEST_FRAME = re.compile(
    r"/(?:starlette|fastapi)/\S+\", line \d+, in (?:app|handle|wrapped_app|run_endpoint_function|solve_dependencies)\b"
    r"|(?:/(?:tool_parsers|reasoning)/\w+|_tool_parser|_reasoning_parser)\.py\", line \d+, in (?:extract_|is_reasoning)"
    r"|/entrypoints/\S*serving\w*\.py\", line \d+, in (?:create_|_?chat_completion_|completion_|responses_)"
)
# Where a request's traceback runs into the engine, the engine failed and not the request.
_ENGINE_FRAME = re.compile(
    r"/vllm/(?:\S*/)?(?:(?:worker|executor|attention|model_executor/(?:models|layers))/\S*\.py\", line \d+, in "
    r"(?!load_)"
    r"|engine/\S*\.py\", line \d+, in (?:run_engine_loop|engine_step|step_async|_log_task_completion|step)\b)"
)
# A handler of requests logs what went wrong with one of them.
_REQUEST_PLACE = re.compile(r"serving(?:_\w+)?\.py:")
# What a request can ask for and not get.
_ASKED = {"arguments", "config", "api"}
_STATISTICS_PLACES = ("metrics.py:", "loggers.py:")
_VALIDATION = re.compile(r"\d+ validation errors? for ")
_VALIDATION_DETAIL = re.compile(r"\s+(?:Value error, |Assertion failed, |[A-Z][^\n]* \[type=)")
_OWN_END = {
    "KeyboardInterrupt",
    "CancelledError",
    "asyncio.CancelledError",
    "asyncio.exceptions.CancelledError",
    "SystemExit",
    "GeneratorExit",
    "bdb.BdbQuit",
}
_CHAINED = ("During handling of the above", "was the direct cause")
# Tracebacks that Python prints and forgets.
_FORGOTTEN = (
    "Exception ignored in",
    "Exception ignored while",
    "--- Logging error ---",
    "Task exception was never retrieved",
    "usage_lib",
    "_report_usage",
)
# What a parser says of one answer of the model goes to one client. (The abstract one loads the parsers at the start.)
_ANSWER_PARSER = re.compile(r"(?!abstract_)\w+_(?:tool|reasoning)_parser\.py:")
# An exception that says nothing but that something was waited for: the one that it led to says what.
_MUTE = re.compile(r"(?:[\w.]+\.)?(?:TimeoutError|Empty|Full)\s*$")
# The last words of a program that has no logger.
_BARE_ERROR = re.compile(r"(?:[Ee]rror|ERROR|[Ff]atal|FATAL|panic): \S")
_BOILERPLATE = re.compile(
    r"WorkerProc\(|EngineCoreProc\(|executor_class\(|super\(\)\.|_init_executor|_init_workers|run_method\(|func\(\*"
    r"|fn\(\*|\.run\(|_target\(|_bootstrap|run_until_complete|\bawait |async with|\byield\b|make_async_mp_client"
    r"|make_client|MPClient\(|launch_core_engines|next\(self\.gen\)|from_vllm_config|from_engine_args|run_engine_core|run_mp_engine|sys\.exit\("
    r"|dispatch_function|collective_rpc|_run_workers|\braise\b|driver_worker|_call_impl|forward_call\("
    r"|engine_core\.run_busy_loop|wait_for_engine_startup|return f\(|cls\(|^[\s\^~]*$|return_value|worker_main"
    r"|run_server|main\(\)|__init__\("
)
# A traceback that breaks off while it waits for somebody else may be that of a stop.
_WAITS = re.compile(r"\b(?:poll|wait|select|recv\w*|get|sleep|accept|join|wait_for\w*|result)\(|KeyboardInterrupt")
# Frames through which every start runs, and in which a stop finds it: no line of theirs says what failed.
_OUTER_FRAME = re.compile(
    r"/entrypoints/|/bin/[\w.-]+\"|/(?:core_client|asyncio/\w+|selectors|threading|signal|runners|connection)\.py\""
    r"|/v1/engine/utils\.py\"|uvloop|/multiprocessing/"
)
# "Last error:", "`ptxas` stderr:": what the line below says is what the message is about.
_ANNOUNCES = re.compile(r"(?i)(?:\berror|\bcause|\bcaused by|\breason|\bstderr|\bexception)\W{0,2}:\s*$")
# The same of an exception's own line: "raised:", "for the following reasons:", but not a name alone or a place.
_OPEN_END = re.compile(r"^\s*[\w.]+: .*[A-Za-z)\]'\"]:\s*$")
# What a stack says of itself below a message is no part of it.
_STACK_TALK = re.compile(r"Exception raised from|frame #|C\+\+ CapturedTraceback|Compile with|For debugging consider")
_QUOTED_CODE = re.compile(r"\s+(?:raise |[rf]?\"|[rf]?'|self\.|return |with |await |assert )")
# A line without a level that nevertheless speaks like a service: enough to call a log benign, never to call it a
# failure.
_SMALL_TALK = re.compile(
    r"(?i)\b(?:warn(?:ing)?|info|notice|deprecated|fall(?:ing)? ?back|disabl(?:ed|ing)|ignor(?:ed|ing)|skipp(?:ed|ing)"
    r"|not supported|unavailable|not available|loading|starting|started|using|initiali[sz]ing|waiting)\b"
)
_JOIN_FROM = 60  # columns: a shorter line was not wrapped by a terminal
_JOIN_LINES = 3
_HEAD_LINES = 12  # so far below an exception a line may still belong to its message
_QUOTED = 120  # characters of a line that is quoted in a sentence
_HANG_AFTER_S = 300
_HANG_REPEATS = 5
# How long nothing but the same "still waiting" is a hang: in a collective, and before it, where imports may be slow.
_WAITED_S = {"distributed": 180, "config": 600, "arguments": 600, "process": 600}


class _Candidate:
    """A line that may be the cause. Slots: a chatty failing engine makes thousands of them."""

    __slots__ = (
        "after",
        "before",
        "fatal",
        "joins",
        "level",
        "message",
        "name",
        "number",
        "phase",
        "rank",
        "shown",
        "signature",
        "tag",
        "tier",
    )

    def __init__(self, number: int, line: Line, rank: int, signature: Signature | None, phase: str) -> None:
        self.number, self.rank, self.signature, self.phase = number, rank, signature, phase
        self.fatal = True
        self.shown, self.message, self.level = line.shown, line.message, line.level
        self.tier, self.tag = line.tier, line.tag
        self.before: list[str] = []
        self.after: list[str] = []
        self.name = ""
        self.joins = 0

    def key(self) -> tuple[int, int, int]:
        return (self.rank, self.tier, -self.number)


class _Source:
    """What one process printed last: whether a traceback is open, and which chain it belongs to."""

    __slots__ = (
        "after_frame",
        "chained",
        "dropped",
        "errors",
        "excused",
        "excused_place",
        "forgotten",
        "frame",
        "head",
        "in_chain",
        "open",
        "outer",
        "request",
        "validation",
        "wrapped",
        "wrapper",
    )

    def __init__(self) -> None:
        self.open = False
        self.after_frame = False
        self.chained = False
        self.in_chain = 0
        self.forgotten = False
        self.dropped = False  # the exception before belonged to a traceback that Python forgets
        self.outer = False  # the last frame is one of those in _OUTER_FRAME
        self.request = False  # the traceback runs through the handling of one request
        self.excused = False  # the last line was a known harmless one: a traceback below it belongs to it
        self.excused_place = ""
        self.frame: _Candidate | None = None
        self.errors: _Candidate | None = None
        self.validation = False
        self.head: _Candidate | None = None  # the exception whose message may go on in the lines below
        self.wrapper: _Candidate | None = None  # "Process EngineCore:", until an exception follows
        self.wrapped: _Candidate | None = None  # the candidate whose value stands on the next line


class Scanner:
    """Reads a log line by line. `feed` each line once, in order; ask `fatal()` while it runs and `result()` at its
    end."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._number = 0
        self._phase = PROCESS
        self._phase_seen = False
        self._ready = False
        self._ready_at = 0
        self._stopped = False
        self._stop_line = ""  # the line that tells of the stop
        self._known = 0  # lines that look like the output of a service at all
        self._bars = 0
        self._alive = False
        self._serving = False  # statistics of a server that answers
        self._harmless = 0
        self._candidates: list[_Candidate] = []
        self._suspects: list[_Candidate] = []
        self._lowest: tuple[int, int, int] = (-1, -1, 0)
        self._sources: dict[str, _Source] = {}
        self._recent: deque[str] = deque(maxlen=CONTEXT_BEFORE)
        self._collecting: list[_Candidate] = []
        self._joining: tuple[_Candidate, str] | None = None
        self._found: dict[tuple[str, str], Signature | None] = {}
        self._marks: dict[tuple[str, str], Mark | None] = {}
        self._certain: _Candidate | None = None
        self._wrapper_seen = False
        self._core_ended = False  # its core ended once all was loaded: the server may call itself up all the same
        self.wrappers = 0  # lines so far that say that the engine, or one request, failed, whatever the cause
        self._hang: dict[str, tuple[_Candidate, int]] = {}  # by kind of hang: the line and how often it was repeated
        self._last_other = 0
        self._beat: Signature | None = None  # the "still waiting" that the line being read is
        self._chatter = False  # whether it is a detail that is neither progress nor a wait
        self._beats = 0  # how many of them follow each other at the end of what was read
        self._beats_since = ""
        self._before_beats: _Candidate | None = None
        self._last_line: Line | None = None
        self._last_progress_time = ""
        self._last_time = ""

    # -- reading
    # --------------------------------------------------------------------------------------------------------------

    def feed(self, line: str) -> None:
        """Take one line without its end; a line with carriage returns in it is taken as several."""
        if "\r" in line:
            for piece in split_lines(line):
                self._feed(piece)
        else:
            self._feed(line.rstrip("\n") if line[-1:] == "\n" else line)

    def _feed(self, raw: str) -> None:
        self._number += 1
        line = parse(raw)
        if self._collecting:
            for candidate in self._collecting:
                candidate.after.append(line.shown)
            self._collecting = [item for item in self._collecting if len(item.after) < CONTEXT_AFTER]
        if line.message and not line.message.isspace():
            self._beat, self._chatter = None, False
            self._take(line)
            if self._beat:
                self._count_beat(self._beat, line)
            elif not self._chatter:
                self._beats = 0
                self._last_line = line
        self._recent.append(line.shown)

    def _count_beat(self, signature: Signature, line: Line) -> None:
        if not self._beats and self._last_line:
            self._beats_since = line.time
            before = list(self._recent)
            # Empty lines may stand between.
            back = next((at for at, text in enumerate(reversed(before), 1) if text == self._last_line.shown), 1)
            self._before_beats = _Candidate(self._number - back, self._last_line, _RANK_HANG, signature, self._phase)
            self._before_beats.before = before[:-back]
            self._collecting.append(self._before_beats)
            self._before_beats.after = [*before[len(before) - back + 1 :], line.shown]
        self._beats += 1

    def _take(self, line: Line) -> None:
        if self._joining:
            self._join(line)
        level = line.level
        if line.time:
            self._last_time = line.time
        if level or line.tag:
            self._known += 1
        mark = self._mark(line)
        if mark:
            self._progress(mark, line)
        if level in {"INFO", "DEBUG"}:
            pairs = self._signatures.infos
            if line.place.startswith(_STATISTICS_PLACES) and "Avg prompt throughput" in line.message:
                self._serving = True
        elif level == "WARNING":
            pairs = self._signatures.warnings
        else:
            if mark and mark.bar:
                self._last_other = self._number
                return
            self._error_line(line)
            return
        signature = self._find(pairs, line.message, level)
        if signature:
            self._signed(signature, line, in_source=False)
        waits = signature is not None and signature.role == "alive"
        if "NCCL INFO" in (line.shown if waits else line.message):  # a wait may be glued to it
            self._nccl_line(line)
        elif waits:
            self._beat = signature
        elif level == "DEBUG" and not mark and (self._beats or self._hang):
            self._chatter = True  # details of somebody else's, while all wait
        else:
            self._last_other = self._number

    def _nccl_line(self, line: Line) -> None:
        """What NCCL tells of itself belongs to the collective that it begins; how far it got names the transport."""
        self._beat = None
        if not self._hang or not re.search("NCCL INFO (?:Channel |Connected )", line.shown):
            return
        for name, (candidate, repeats) in self._hang.items():
            if candidate.signature and candidate.signature.hang == "last" and candidate.number > self._last_other:
                further = _Candidate(self._number, line, _RANK_HANG, candidate.signature, candidate.phase)
                further.before = list(self._recent)
                self._collecting = [item for item in self._collecting if item.signature is not candidate.signature]
                self._collecting.append(further)
                self._hang[name] = (further, repeats)

    def _mark(self, line: Line) -> Mark | None:
        message = line.message
        if not line.place or "%" in message:
            return mark_of(line)
        key = (line.place, message[:24])  # one place in the program prints one kind of message
        if key in self._marks:
            return self._marks[key]
        mark = mark_of(line)
        if len(self._marks) >= _CACHE_KEPT:
            self._marks.clear()
        self._marks[key] = mark
        return mark

    def _find(self, pairs: tuple[tuple[str, Signature], ...], message: str, level: str) -> Signature | None:
        key = (level, message)
        if key in self._found:
            return self._found[key]
        signature = find(pairs, message)
        if len(message) <= _CACHED_LENGTH:
            if len(self._found) >= _CACHE_KEPT:
                self._found.clear()
            self._found[key] = signature
        return signature

    def _progress(self, mark: Mark, line: Line) -> None:
        new = mark.phase
        if mark.bar:
            self._bars += 1
        self._last_progress_time = line.time or self._last_progress_time
        restarted = ORDER[new] <= ORDER["arguments"] < ORDER[self._phase]
        if restarted or not self._phase_seen or ORDER[new] >= ORDER[self._phase]:
            self._phase = new
            self._phase_seen = True
        if restarted:
            self._ready = self._core_ended = False
        if new == READY:
            if self._ready and self._wrapper_seen:
                return  # a request that was under way when the engine died is still answered
            self._ready = True
            self._ready_at = self._number
            if self._core_ended:
                return
            # The server is up, so nothing before this line ended the start.
            for candidate in self._candidates:
                candidate.fatal = False
            self._certain = None
            self._wrapper_seen = False
        elif not restarted and not self._wrapper_seen:
            for candidate in self._candidates:
                if candidate.fatal and self._went_on(candidate, mark, line):
                    candidate.fatal = False

    @staticmethod
    def _went_on(candidate: _Candidate, mark: Mark, line: Line) -> bool:
        """Whether this progress shows that the engine outlived the candidate."""
        signature = candidate.signature
        later = ORDER[mark.phase] > ORDER[candidate.phase]
        if later and line.tier in {CORE, API} and (signature is None or signature.rank < RANKS["cause"]):
            return True
        # Printed by nobody in particular, at no level: Python's own words about something that it dropped.
        plain = candidate.tier == NATIVE and not candidate.level and (signature is None or signature.cls == "transient")
        return plain and (later or mark.bar is not None) and ORDER[mark.phase] > ORDER["arguments"]

    # -- lines that may be failures
    # -------------------------------------------------------------------------------------------

    def _source(self, line: Line) -> _Source:
        key = f"{line.tag}:{line.pid}" if line.tag else ""
        source = self._sources.get(key)
        if source is None:
            if len(self._sources) >= _SOURCES_KEPT:
                self._sources.clear()
            source = self._sources[key] = _Source()
        return source

    def _traceback_line(self, source: _Source, line: Line) -> bool:
        """Take a line that only builds a traceback up; False where the line is none."""
        message = line.message
        if source.wrapped and self._wrapped_value(source, line):
            pass
        elif "Traceback (most recent call last)" in message:
            self._open_traceback(source, line)
        elif "xception" in message and any(text in message for text in _CHAINED):
            source.chained = True
            source.forgotten = source.dropped
        elif any(text in message for text in _FORGOTTEN):
            source.forgotten = True
            self._harmless += 1
        elif _FRAME.match(message):
            source.open = source.after_frame = True
            source.outer = not line.level and bool(_OUTER_FRAME.search(message))
            if source.request:
                source.request = not _ENGINE_FRAME.search(message)
            elif _REQUEST_FRAME.search(message):
                source.request = True
        else:
            return False
        self._last_other = self._number
        return True

    def _answer_line(self, line: Line) -> None:
        message = line.message
        self._known += 1
        self._harmless += 1
        self._last_other = self._number
        # Its traceback carries the prefix too; where it does not, the line that announces it stands for it.
        own = message[:1] in {" ", "\t"} or "Traceback (" in message or _EXCEPTION.match(message)
        source = self._source(line)
        source.excused, source.excused_place = not own, line.place

    def _request_line(self) -> None:
        self._known += 1
        self._harmless += 1

    def _error_line(self, line: Line) -> None:
        if _ANSWER_PARSER.match(line.place):
            self._answer_line(line)
            return
        message = line.message
        source = self._source(line)
        if self._traceback_line(source, line):
            return
        indented = message[:1] in {" ", "\t"}
        # Copied logs are indented as a whole, exception groups have a bar in front; quoted code never looks like this.
        exception = None if source.after_frame and indented else _EXCEPTION.match(message.lstrip(" \t|+"))
        if not exception and (source.open or (indented and _QUOTED_CODE.match(message))):
            if source.after_frame or indented:
                self._source_line(source, line)
                return
            exception = _IN_TRACEBACK.match(message)
        source.after_frame = False
        signature = self._find(self._signatures.errors, message, "E")
        if signature and signature.role == "alive":
            self._beat = signature
        else:
            self._last_other = self._number
        source.excused = False
        head, source.head = source.head, None
        if head and self._number - head.number > _HEAD_LINES:
            head = None
        if exception:
            self._exception(source, line, exception["name"], signature)
        elif head and _ANNOUNCES.search(message):
            source.wrapped = head
        elif signature:
            source.errors = None
            source.head = head
            self._signed(signature, line, in_source=False)
        elif source.validation and _VALIDATION_DETAIL.match(message):
            source.validation = False
            self._add(line, _RANK_DETAIL, None, fatal=True)
        elif _VALIDATION.match(message):
            source.validation = True
            self._add(line, _RANK_VALIDATION, None, fatal=True)
        elif line.level and _REQUEST_PLACE.match(line.place):
            self._request_line()
        elif line.level:
            source.head = head
            source.errors = self._add(line, _RANK_ERROR, None, fatal=False)
        elif head and not _STACK_TALK.search(message):
            source.head = head
        elif _BARE_ERROR.match(message):
            self._add(line, _RANK_ERROR, None, fatal=False)
        elif not self._known and _SMALL_TALK.search(message):
            self._known += 1

    def _open_traceback(self, source: _Source, line: Line) -> None:
        source.head = None
        self._last_other = self._number
        head = line.message.partition("Traceback (most recent call last)")[0].rstrip(" ,:")
        signature = find(self._signatures.errors, head) if head.strip() else None
        if head.strip():  # "Exception in worker ... while processing method init_device: NCCL error, Traceback ..."
            if signature:
                self._signed(signature, line, in_source=False)
            elif line.level:
                self._add(line, _RANK_LOGGED, None, fatal=True)
        elif (
            line.level
            and not _REQUEST_PLACE.match(line.place)
            and source.errors
            and source.errors.message
            and not source.errors.signature
        ):
            # logger.exception(str(error)): the text above the traceback is the exception's own.
            source.errors.rank = _RANK_LOGGED
            source.errors.fatal = not self._ready
            self._lowest = (-1, -1, 0)
        source.errors = None
        if source.excused:
            source.excused = False
            # What another place in the program logs is no part of it.
            source.forgotten = not line.level or line.place == source.excused_place
        if not source.chained:
            source.in_chain = 0
            source.request = bool(_REQUEST_PLACE.match(line.place))
        source.chained = False
        source.open = True
        source.after_frame = False

    def _source_line(self, source: _Source, line: Line) -> None:
        source.after_frame = False
        self._last_other = self._number
        message = line.message.strip()
        if not message or source.forgotten:
            return
        if "raise " in message or message[0] in "\"'f" or not _BOILERPLATE.search(message):
            signature = self._find(self._signatures.errors, message, "E")
            if signature and signature.role in {"cause", "effect"}:
                self._signed(signature, line, in_source=True)
                return
        if (
            line.tier not in {API, SYSTEMD}
            and not source.outer
            and not _BOILERPLATE.search(message)
            and re.search(r"[\w\]]\(|=|\.", message)
        ):
            candidate = _Candidate(self._number, line, _RANK_FRAME, None, self._phase)
            candidate.before = list(self._recent)
            source.frame = candidate

    def _exception(self, source: _Source, line: Line, name: str, signature: Signature | None) -> None:
        in_traceback, source.open = source.open, False
        forgotten, source.forgotten = source.forgotten, False
        source.dropped = forgotten
        source.frame = None
        source.errors = None
        source.wrapper, wrapper = None, source.wrapper
        source.validation = bool(_VALIDATION.search(line.message))
        first = source.in_chain == 0
        source.in_chain += 1
        if not source.chained and not in_traceback:
            first = True
        if forgotten:
            return
        short = name.rpartition(".")[2]
        if name in _OWN_END or short in _OWN_END or short.endswith("nterrupt"):
            if wrapper or short == "SystemExit":  # what was announced is the end that somebody asked for
                for item in (wrapper, *(other.wrapper for other in self._sources.values())):
                    if item:
                        item.fatal = False
                self._wrapper_seen = any(
                    item.fatal and item.signature and item.signature.role == "wrapper" for item in self._candidates
                )
            if short.endswith("nterrupt"):
                self._stop(line)
            self._harmless += 1
            return
        if signature:
            self._signed(signature, line, in_source=False, name=name)
            last = self._candidates[-1] if self._candidates else None
            if last and last.number == self._number and signature.rank < RANKS["cause"]:
                source.head = last
                if signature.role != "wrapper" and _OPEN_END.search(line.message):
                    source.wrapped = last
            return
        if (
            source.request or _REQUEST_PLACE.match(line.place)
        ) and not self._ready:  # one request's; a server that died of it says so itself
            self._request_line()
            return
        rank = _RANK_EXCEPTION if first else _RANK_LATER
        if _MUTE.match(line.message):
            rank = _RANK_MUTE
        if source.validation:
            rank = _RANK_VALIDATION
        candidate = self._add(line, rank, None, fatal=not self._ready and not self._stopped)
        candidate.name = name
        source.head = candidate
        if _OPEN_END.search(line.message):
            source.wrapped = candidate
        if len(line.shown) >= _JOIN_FROM:
            self._joining = (candidate, line.message)

    def _signed(self, signature: Signature, line: Line, in_source: bool, name: str = "") -> None:
        role = signature.role
        self._known += 1
        if role == "benign":
            self._harmless += 1
            if line.level in {"ERROR", "CRITICAL", ""}:
                source = self._source(line)
                source.excused, source.excused_place = True, line.place
            return
        if role == "stop":
            self._harmless += 1
            self._stop(line)
            return
        if role == "alive":
            self._alive = True
            if signature.hang in {"last", "served"}:
                old = self._hang.get(signature.id)
                candidate = _Candidate(self._number, line, _RANK_HANG, signature, self._phase)
                candidate.before = list(self._recent)
                self._collecting.append(candidate)
                keep = old[0] if old and signature.hang == "served" and old[0].number > self._last_other else candidate
                self._hang[signature.id] = (keep, old[1] + 1 if old and old[0].number > self._last_other else 1)
            return
        if line.level in {"INFO", "DEBUG", "WARNING"} and signature.level == "warning":
            self._suspects.append(self._new(line, _RANK_SUSPECT, signature, fatal=False))
            del self._suspects[8:]
            return
        if role == "cause" and not self._ready and signature.phase in _ASKED and self._source(line).request:
            self._request_line()
            return
        fatal = not (self._stopped and signature.rank < RANKS["cause"])
        asked = signature.cls in {"config", "model"} or signature.phase == "config"
        if self._ready and line.tier == API and role == "cause" and asked:
            fatal = False  # somebody's bad request, not the end of the server
        rank = signature.rank - (_SOURCE_PENALTY if in_source else 0)
        candidate = self._add(line, rank, signature, fatal)
        candidate.name = name
        if role == "wrapper" and fatal:
            if not name and signature.rank < RANKS["wrapper"]:
                self._source(line).wrapper = candidate
            self._wrapper_seen = True
            self.wrappers += 1
            self._core_ended = self._core_ended or (line.tier == CORE and self._phase == "api")
        if signature.certain and fatal and not in_source and self._certain is None:
            self._certain = candidate
        if line.message.rstrip().endswith(": Value"):
            self._source(line).wrapped = candidate

    def _wrapped_value(self, source: _Source, line: Line) -> bool:
        """The value of "argument --x: Value", or of "Last error:", stands on the next line, and is what is wrong."""
        parent, source.wrapped = source.wrapped, None
        if not parent or self._number - parent.number > _HEAD_LINES or "Traceback (most" in line.message:
            return False
        if _FRAME.match(line.message):
            return False
        signature = self._find(self._signatures.errors, line.message, "E")
        if signature and signature.role in {"cause", "effect"} and signature.rank > parent.rank:
            self._signed(signature, line, in_source=False)
        elif not (signature and signature.role in {"wrapper", "benign", "stop"}):
            self._add(line, parent.rank + 1, parent.signature, parent.fatal)
        return True

    def _join(self, line: Line) -> None:
        """Look at an exception again together with the lines below it: a terminal may have wrapped it."""
        candidate, text = self._joining or (None, "")
        self._joining = None
        if (
            candidate is None
            or line.level
            or (line.tag and line.tag != candidate.tag)
            or candidate.joins >= _JOIN_LINES
        ):
            return
        candidate.joins += 1
        if self._find(self._signatures.errors, line.message, "E"):
            return  # the line says it by itself
        for joined in (text + line.message, text + " " + line.message.strip()):
            signature = find(self._signatures.errors, joined)
            if signature and signature.role in {"cause", "effect", "wrapper"}:
                candidate.signature, candidate.rank = signature, signature.rank
                self._lowest = (-1, -1, 0)
                return
        self._joining = (candidate, text + line.message)

    def _stop(self, line: Line) -> None:
        if not any(candidate.fatal for candidate in self._candidates):
            self._stopped = True
            self._stop_line = self._stop_line or line.message.strip()

    def _new(self, line: Line, rank: int, signature: Signature | None, fatal: bool) -> _Candidate:
        candidate = _Candidate(self._number, line, rank, signature, self._phase)
        candidate.fatal = fatal
        candidate.before = list(self._recent)
        self._collecting.append(candidate)
        return candidate

    def _add(self, line: Line, rank: int, signature: Signature | None, fatal: bool) -> _Candidate:
        candidate = self._new(line, rank, signature, fatal)
        full = len(self._candidates) >= _CANDIDATES_KEPT
        if full and candidate.key() <= self._lowest:
            return candidate
        self._candidates.append(candidate)
        if full:
            self._candidates.sort(key=lambda item: (item.fatal, item.key()), reverse=True)
            del self._candidates[_CANDIDATES_KEPT * 3 // 4 :]
            self._lowest = min(item.key() for item in self._candidates)
        return candidate

    # -- answers
    # --------------------------------------------------------------------------------------------------------------

    def fatal(self) -> dict[str, Any] | None:
        """The diagnosis once the start has certainly failed, else None. For a live wait: cheap, to be asked after
        each line.

        Certain means that the engine said so itself: an argument parser's last words, or "engine core failed"
        together with a cause. It says nothing while only the wrapper was printed, since the traceback with the cause
        comes after it.
        """
        if self._certain is not None:
            return self._fatal_result(self._certain) if self._certain.fatal else None
        if not self._wrapper_seen:
            return None
        best = self._best()
        return self._fatal_result(best) if best and best.rank >= _RANK_VALIDATION else None

    def _best(self) -> _Candidate | None:
        fatal = [candidate for candidate in self._candidates if candidate.fatal]
        if not fatal:
            return None
        if (
            self._ready and self._wrapper_seen
        ):  # the engine died while serving: what was one failed request is now the cause
            fatal += [item for item in self._candidates if item.number > self._ready_at and item.rank >= _RANK_LATER]
        best = max(fatal, key=_Candidate.key)
        if best.rank <= _RANK_SUSPECT and self._suspects:
            return max(self._suspects, key=_Candidate.key)
        if best.rank < _RANK_FRAME:
            frames = [source.frame for source in self._sources.values() if source.frame and source.open]
            if frames:
                return max(frames, key=_Candidate.key)
        if best.tier == SYSTEMD and best.rank < _RANK_ERROR:
            return self._last_words(best)
        return best

    def _last_words(self, end: _Candidate) -> _Candidate:
        """The last error line before systemd's message that the process ended, or that message."""
        words = [
            item for item in self._candidates if item.rank == _RANK_ERROR and self._ready_at < item.number < end.number
        ]
        return max(words, key=lambda item: item.number, default=end)

    def _open_frame(self) -> _Candidate | None:
        """The last own line of a traceback whose end is missing: logged as an error, or where the text breaks off."""
        frames = [
            source.frame
            for source in self._sources.values()
            if source.frame
            and source.open
            and not (source.forgotten or source.request or _WAITS.search(source.frame.message))
            and (source.frame.level in {"ERROR", "CRITICAL"} or source.frame.number == self._last_other)
        ]
        return max(frames, key=_Candidate.key, default=None)

    def _hung(self) -> _Candidate | None:
        for candidate, repeats in self._hang.values():
            kind = candidate.signature.hang if candidate.signature else None
            if candidate.number <= self._last_other:
                continue
            if kind == "last" and candidate.phase in {"process", "distributed"}:
                return candidate
            if kind == "served" and ORDER[candidate.phase] >= ORDER[KV_CACHE]:
                waited = _seconds_between(self._last_progress_time, self._last_time)
                if self._ready or repeats >= _HANG_REPEATS or waited >= _HANG_AFTER_S:
                    return candidate
        return self._waited()

    def _waited(self) -> _Candidate | None:
        """The last line before nothing but the same "still waiting" came, for longer than that step takes."""
        candidate = self._before_beats
        if not candidate or not candidate.signature or candidate.signature.hang not in {"waited", "served"}:
            return None
        limit_s = _WAITED_S.get(candidate.phase)
        if limit_s is None or self._beats < _HANG_REPEATS:
            return None
        return candidate if _seconds_between(self._beats_since, self._last_time) >= limit_s else None

    def result(self, ended: bool = True) -> dict[str, Any]:
        """The diagnosis of what was read. `ended` False says that the log is still being written, so that silence is
        no hang."""
        best = self._best()
        if best is None:
            best = self._open_frame() if not self._ready and not self._stopped else None
        if best is None and ended and not self._stopped:
            best = self._hung()
        if best is not None:
            return self._fatal_result(best)
        return self._no_failure(ended)

    def _fatal_result(self, best: _Candidate) -> dict[str, Any]:
        signature = best.signature
        cls, remedy = (signature.cls, signature.remedy) if signature and signature.role != "wrapper" else _guess(best)
        phase = best.phase if self._phase_seen else None
        if signature and signature.phase and (phase is None or best.tier == SYSTEMD or phase == PROCESS):
            phase = signature.phase
        return {
            "verdict": "fatal",
            "phase": phase or PROCESS,
            "root_cause": best.shown,
            "signature": signature.id if signature else None,
            "class": cls,
            "remedy": remedy,
            "recognised": bool(signature and signature.role != "wrapper"),
            "line": best.number,
            "printed_by": best.tag or None,
            "context": [*best.before, best.shown, *best.after],
        }

    def _no_failure(self, ended: bool) -> dict[str, Any]:
        loading = self._phase_seen and ORDER[self._phase] >= ORDER[WEIGHTS] and not self._ready
        lone = max(self._candidates, key=_Candidate.key, default=None)
        unsettled = lone is not None and not self._ready and self._last_other <= lone.number and not self._stopped
        if unsettled:
            verdict = "unknown"
        elif not self._stopped and (self._bars or self._alive or loading) and not (self._ready or self._serving):
            verdict = "alive"
        elif self._known or self._harmless or self._phase_seen:
            verdict = "benign"
        else:
            verdict = "unknown"
        shown = lone if unsettled else None
        return {
            "verdict": verdict,
            "phase": self._phase if self._phase_seen else None,
            "root_cause": shown.shown if shown else None,
            "signature": None,
            "class": None,
            "remedy": self._advice(verdict, ended),
            "recognised": False,
            "line": shown.number if shown else None,
            "printed_by": (shown.tag or None) if shown else None,
            "context": [*shown.before, shown.shown, *shown.after] if shown else [],
        }

    def _advice(self, verdict: str, ended: bool) -> str:
        """What to do where no line shows a failure; a load that ended before it was ready is not well for that."""
        if verdict == "unknown":
            return "No line shows a failure or a healthy start: give the whole log, from the start of the process on."
        before_ready = self._phase_seen and not (self._ready or self._serving)
        if self._stopped:
            stop = f'Nothing failed: the engine was asked to stop ("{_cut(self._stop_line)}").'
            if not before_ready:
                return stop
            return (
                f"{stop} It was loading (phase {self._phase}) and not ready yet: find who sent the stop. If it was a "
                "limit (startup probe, TimeoutStartSec=, a deploy's timeout), raise it above the load's time, then "
                "start again."
            )
        if before_ready and ended:
            return (
                f"No line shows a failure, and the log ends in phase {self._phase}, before the server was ready. If "
                "the process still runs, the load goes on. If it is gone, the reason stands elsewhere: its exit status "
                "(systemctl status, the container's events) and the kernel log of that minute (OOM killer)."
            )
        return "Nothing to do: the load goes on." if verdict == "alive" else "Nothing to do: no line shows a failure."


def _cut(text: str) -> str:
    return text if len(text) <= _QUOTED else text[:_QUOTED] + "..."


def _seconds_between(earlier: str, later: str) -> float:
    """Seconds between two engine times "MM-DD HH:MM:SS" of one month; 0 where one is missing or the month turned."""
    found = [re.fullmatch(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)", text) for text in (earlier, later)]
    if not found[0] or not found[1] or found[0][1] != found[1][1]:
        return 0.0
    a, b = ([int(part) for part in match.groups()[1:]] for match in found if match)
    return float(max(0, ((b[0] - a[0]) * 24 + b[1] - a[1]) * 3600 + (b[2] - a[2]) * 60 + b[3] - a[3]))


# Arguments of the engine, as its messages name them.
_ARGUMENT = (
    r"(?<![\w-])--[a-z][\w-]{2,}|\b(?:tensor|pipeline|data|expert|context|decode_context|sequence)[_ ]parallel\w*"
    r"|\bnum_speculative\w+|\bspeculative\w*|\b[Ss]pec[-_ ]?[Dd]ec\w*|\bmax_(?:model_len|num_\w+|seq\w*|lora\w*)"
    r"|\bmax-(?:model-len|num-[\w-]+)|\bgpu_memory_utilization|\bblock[_ ]size|\bkv[-_]cache[-_]dtype|\benforce_eager"
    r"|\b[Cc]hunked[_ ]prefill|\b[Pp]refix[_ ]caching|\bcudagraph\w*|\bCUDA graph|\bcompilation_config"
    r"|\battention[_ ]backend|\b(?:enable|disable|use)_[a-z]\w+|\bVLLM_[A-Z_\d]+"
)
# What an exception that no signature names most likely is about, by its name and text; the first that fits decides.
_GUESSES: tuple[tuple[re.Pattern[str], str, str], ...] = tuple(
    (re.compile(pattern), cls, remedy)
    for pattern, cls, remedy in (
        (
            r"CUDA error|HIP error|cuda runtime error|NVML|NVRM|cuBLAS|CUBLAS|cudnn|illegal memory|device-side assert"
            r"|NCCL (?:error|WARN|operation)|ncclResult",
            "host",
            "check the GPUs (nvidia-smi, kernel log) and the driver before the next start",
        ),
        (
            r"No space left|Read-only file system|Input/output error|Permission denied|Too many open|Cannot allocate"
            r"|Operation not permitted|Resource temporarily unavailable",
            "host",
            "free or repair what the message names (disk, rights, limits) and start again",
        ),
        (
            r"(?i)memory allocation|\bout of memory\b|allocat\w+ .{0,40}memory",
            "config",
            "memory ran out; if the GPU's, lower gpu_memory_utilization, max_num_seqs or the context length, and see "
            "that nobody else is on the card",
        ),
        (
            r"(?i)\bdownload(?:ing|ed)?\b.{0,80}(?:fail|error|abort|interrupt)"
            r"|(?:fail|error|unable|could ?n.t).{0,60}\b(?:download|fetch|reach|connect)|huggingface\.co|hf\.co"
            r"|modelscope|connection (?:reset|refused|aborted|broken|error)|reqwest|hyper::|urlopen|RemoteDisconnected"
            r"|ProtocolError|name resolution|remote end closed|bad gateway|service unavailable",
            "transient",
            "a download or a connection broke; start again, or fetch beforehand what the message names",
        ),
        (
            r"^(?:[\w.]*\.)?(?:\w*Timeout(?:Error|Exception|Expired)?|Connection\w*Error|gaierror)\b|timed out",
            "transient",
            "start again; when it comes back, look at what was waited for",
        ),
        (
            r"^(?:[\w.]*\.)?(?:ModuleNotFoundError|ImportError)\b",
            "config",
            "install what is missing into this variant's engine virtualenv, or pin the release that had it",
        ),
        (
            _ARGUMENT
            + r"|\b[Pp]lease (?:set|use|adjust|disable|enable|reduce|increase|lower|specify|pass|choose|try)\b"
            r"|\bnot (?:yet )?(?:supported|compatible|implemented|allowed)\b|[Uu]nsupported|(?:does|do) not support"
            r"|incompatible|cannot be used|only support(?:s|ed)|\b[Uu]nknown\b|\b[Uu]nrecogni[sz]ed\b"
            r"|\bnot (?:recogni[sz]ed|registered)\b"
            r"|must be (?:one of|set|divisible|greater|less|between|positive|in\b)",
            "config",
            "the line names an argument, or something that this release does not know or support; change or drop it in "
            "the variant's entry, or take a release that has it",
        ),
        (
            r"^(?:[\w.]*\.)?(?:TypeError|NameError|AttributeError|NotImplementedError|UnboundLocalError)\b"
            r"|input tensor|view size|tensor_allocate|broadcast|non-singleton|mat1 and mat2"
            r"|is invalid for input of size",
            "config",
            "engine, its plug-ins and libraries do not fit each other, or the release does not know this model; "
            "compare variant and release with the last good ones",
        ),
        (
            r"(?i:safetensor|checkpoint|state_dict|\bweights?\b|weight_|\w\.weight|\.json\b|tokeni[sz]er|\btensors?\b"
            r"|embedding|vocab)",
            "model",
            "compare the model folder with its manifest, and the model with what this engine release supports",
        ),
        (
            r"^(?:[\w.]*\.)?(?:FileNotFoundError|NotADirectoryError|IsADirectoryError)\b.*(?i:model|\.gguf|\.bin|hub|snapshot)",
            "model",
            "check that the path exists and is readable for the service user",
        ),
        (
            r"^(?:[\w.]*\.)?(?:FileNotFoundError|NotADirectoryError|IsADirectoryError)\b",
            "host",
            "check that the path exists and is readable for the service user",
        ),
        (
            r"^(?:[\w.]*\.)?(?:AssertionError|KeyError|IndexError|AttributeError|StopIteration|RuntimeError|Exception)"
            r"(?::?\s*$|: [^ ]*$)",
            "config",
            "the exception says next to nothing; read the frames above it for the part that failed, and compare model, "
            "arguments and engine release with the last good ones",
        ),
    )
)


def _guess(best: _Candidate) -> tuple[str, str]:
    for pattern, cls, remedy in _GUESSES:
        if pattern.search(best.message):
            names = dict.fromkeys(re.findall(_ARGUMENT, best.message)) if "argument" in remedy else {}
            return cls, "not recognised; " + remedy + (f" ({', '.join(names)})" if names else "")
    return (
        "config",
        "not recognised; read the context, and compare this variant's arguments and engine with the last good one",
    )


def diagnose(log: str | Iterable[str], signatures: Signatures, ended: bool = True) -> dict[str, Any]:
    """Diagnose a whole log: text, or an iterable of lines. Constant memory where the iterable is a generator.

    Returns ``verdict`` (fatal, benign, alive, unknown), ``phase``, ``root_cause`` (the line as it stands, without
    escape codes, or None), ``signature`` (its id or None), ``class``, ``remedy``, ``recognised``, ``line`` (its
    number, from 1), ``printed_by`` and ``context`` (up to `CONTEXT_BEFORE` lines before and `CONTEXT_AFTER` after).
    """
    scanner = Scanner(signatures)
    for line in split_lines(log) if isinstance(log, str) else log:
        scanner.feed(line)
    return scanner.result(ended)
