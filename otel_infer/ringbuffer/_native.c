/* Writes ring cells: what `writer.RequestWriter.write_event` and `batch_writer.BatchWriter` do in Python, as C.
 *
 * On the thread of an engine these calls run with cold caches, where their price is the memory that they touch:
 * a Python function touches about twenty cache lines, the same work here two or three.
 *
 * Optional: without this module the Python code of those classes runs. It uses the stable ABI of Python 3.11, so one
 * build serves all later releases. All functions need the GIL; nothing here runs Python code between the reservation
 * of a cell and its last byte, except that an unknown text is interned before the reservation.
 */
#include "_native.h"

enum { W_KEYFRAME_REQUESTED = 10, W_UNRECORDED = 11, W_OFFERED = 17, W_NOT_RECORDED = 18 };
enum { PAGE = 4096, CELL_BYTES = 64, PART_BYTES = 36, MAX_PARTS = 64, MAX_FIELDS = 16 };

/* A cell: sequence, code, part, parts, 0, handle, body, sequence (`layout.CELL`). */
enum { CODE_AT = 8, HANDLE_AT = 12, BODY_AT = 16, END_AT = 56 };

int64_t read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Writes a whole cell. A reader compares the sequences at both ends, so the last one is stored last. */
static void store_cell(char *to, uint64_t sequence, const char *middle)
{
    __atomic_store_n((uint64_t *)to, sequence, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(to + CODE_AT, middle, END_AT - CODE_AT);
    __atomic_store_n((uint64_t *)(to + END_AT), sequence, __ATOMIC_RELEASE);
}

/* ── request ring ───────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject *event;  /* the type of the event */
    uint8_t code, count;
    char fields[MAX_FIELDS];  /* q Q I H B, S and T (a text's id as I and H), 16 and 8 (bytes) as 'X' and 'x'; A: see
                                 `write_attribute_set` */
} Layout;

static int fail_range(void)
{
    PyErr_SetString(PyExc_ValueError, "a field of the event is out of range");
    return -1;
}

static int pack_number(char *to, char kind, PyObject *value, int *size)
{
    if (kind == 'q') {
        int64_t number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred()) return -1;
        memcpy(to, &number, *size = 8);
        return 0;
    }
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) return -1;
    uint64_t number = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (number == (uint64_t)-1 && PyErr_Occurred()) return -1;
    *size = kind == 'Q' ? 8 : kind == 'I' ? 4 : kind == 'H' ? 2 : 1;
    if (*size < 8 && number >> (8 * *size)) return fail_range();
    memcpy(to, &number, *size);  /* little-endian, which `_build` checks */
    return 0;
}

/* Stores the id of a text, which is found by the identity of the object: a look-up by hash has several cache misses. */
static void remember_text(RequestRing *self, size_t place, PyObject *text, PyObject *id)
{
    PyObject *old = self->known_texts[place];
    self->known_ids[place] = (uint32_t)PyLong_AsUnsignedLong(id);
    Py_INCREF(text);
    self->known_texts[place] = text;
    Py_XDECREF(old);
}

static int pack_text(RequestRing *self, char *to, char kind, PyObject *text, int *size)
{
    size_t place = ((uintptr_t)text >> 4) % KNOWN_TEXTS;
    if (self->known_texts[place] == text && (kind == 'S' || self->known_ids[place] <= UINT16_MAX)) {
        memcpy(to, &self->known_ids[place], *size = kind == 'S' ? 4 : 2);
        return 0;
    }
    PyObject *id = PyDict_GetItemWithError(self->strings, text), *made = NULL;
    if (id == NULL) {
        if (PyErr_Occurred()) return -1;
        PyObject *plain = PyObject_Str(text);
        if (plain == NULL) return -1;
        id = made = PyObject_CallFunctionObjArgs(self->intern, plain, NULL);
        Py_DECREF(plain);
        if (id == NULL) return -1;
    }
    int failed = pack_number(to, kind == 'S' ? 'I' : 'H', id, size);
    if (made == NULL && !failed && PyUnicode_CheckExact(text)) remember_text(self, place, text, id);
    Py_XDECREF(made);
    return failed;
}

static int pack_bytes(char *to, int wanted, PyObject *value, int *size)
{
    char *data;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(value, &data, &length)) return -1;
    memset(to, 0, wanted);
    memcpy(to, data, length < wanted ? length : wanted);
    *size = wanted;
    return 0;
}

static int pack_field(RequestRing *self, char *to, char kind, PyObject *value, int *size)
{
    if (kind == 'S' || kind == 'T') return pack_text(self, to, kind, value, size);
    if (kind == 'X' || kind == 'x') return pack_bytes(to, kind == 'X' ? 16 : 8, value, size);
    return pack_number(to, kind, value, size);
}

static void store_next_cell(RequestRing *self, const char *middle)
{
    uint64_t cell = self->next_cell++;
    store_cell((char *)self->memory.buf + PAGE + cell % self->cells * CELL_BYTES, cell + 1, middle);
}

/* An event in several cells; a part may be shorter than `PART_BYTES`. */
typedef struct {
    int code, parts;
    uint32_t handle, first;
} LongEvent;

static void store_part(RequestRing *self, uint64_t cell, LongEvent event, int part, const char *body, size_t size)
{
    char middle[END_AT - CODE_AT] = {0};
    middle[0] = (char)event.code;
    middle[1] = (char)part;
    middle[2] = (char)event.parts;
    memcpy(middle + HANDLE_AT - CODE_AT, &event.handle, 4);
    memcpy(middle + BODY_AT - CODE_AT, &event.first, 4);
    memcpy(middle + BODY_AT - CODE_AT + 4, body, size);
    store_cell((char *)self->memory.buf + PAGE + cell % self->cells * CELL_BYTES, cell + 1, middle);
}

void write_long(RequestRing *self, int code, uint32_t handle, const char *body, size_t length)
{
    if (length <= END_AT - BODY_AT) {
        char padded[END_AT - BODY_AT] = {0};
        memcpy(padded, body, length);
        write_cell(self, code, handle, padded);
        return;
    }
    int parts = (int)((length + PART_BYTES - 1) / PART_BYTES);
    uint64_t cell = self->next_cell;
    self->next_cell = cell + parts;
    LongEvent event = {code, parts, handle, (uint32_t)(cell + 1)};
    for (int part = 0; part < parts; part++) {
        size_t from = (size_t)part * PART_BYTES, rest = length - from;
        store_part(self, cell + part, event, part, body + from, rest < PART_BYTES ? rest : PART_BYTES);
    }
}

/* ── attributes ────────────────────────────────────────────────────────────────────────────────────────────── */

/* Returns the UTF-8 of a text that JSON writes as it is (`codec._is_plain_text`); NULL for any other object. */
static const char *find_plain_text(PyObject *text, Py_ssize_t *length)
{
    const char *plain = text != NULL && PyUnicode_CheckExact(text) ? PyUnicode_AsUTF8AndSize(text, length) : NULL;
    if (plain == NULL) { PyErr_Clear(); return NULL; }
    for (Py_ssize_t i = 0; i < *length; i++)
        if (plain[i] < ' ' || plain[i] > '~' || plain[i] == '"' || plain[i] == '\\') return NULL;
    return plain;
}

static char *append(char *to, const char *text, Py_ssize_t length)
{
    memcpy(to, text, (size_t)length);
    return to + length;
}

/* Appends a decimal number. Not by `snprintf`, whose code would have to be fetched for each request. */
static char *append_number(char *to, int64_t number)
{
    char digits[20];
    int at = sizeof digits;
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    do digits[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0) *to++ = '-';
    return append(to, digits + at, (Py_ssize_t)sizeof digits - at);
}

int write_attribute(RequestRing *self, int code, uint32_t handle, int64_t at, PyObject *key, PyObject *value)
{
    enum { AROUND_TEXTS = 28 };  /* brackets, commas, quotes and the longest number */
    char body[MAX_PARTS * PART_BYTES], *end = body;
    Py_ssize_t key_length, value_length;
    const char *name = find_plain_text(key, &key_length), *text = find_plain_text(value, &value_length);
    if (name == NULL || text == NULL || key_length + value_length > (Py_ssize_t)sizeof body - AROUND_TEXTS) return 0;
    *end++ = '[';
    end = append_number(end, at);
    end = append(append(end, ",\"", 2), name, key_length);
    end = append(append(end, "\",\"", 3), text, value_length);
    end = append(end, "\"]", 2);
    write_long(self, code, handle, body, (size_t)(end - body));
    return 1;
}

/* Writes the event of an attribute. Returns 0 if Python code must write it. */
static int write_attribute_set(RequestRing *self, int code, PyObject *handle, PyObject *event)
{
    uint32_t owner;
    int size;
    if (PyTuple_Size(event) != 3) return 0;
    long long at = PyLong_AsLongLong(PyTuple_GetItem(event, 0));
    if ((at == -1 && PyErr_Occurred()) || pack_number((char *)&owner, 'I', handle, &size)) { PyErr_Clear(); return 0; }
    return write_attribute(self, code, owner, at, PyTuple_GetItem(event, 1), PyTuple_GetItem(event, 2));
}

PyObject *write_event(RequestRing *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2) return PyErr_Format(PyExc_TypeError, "write_event takes a handle and an event");
    PyObject *packed = PyDict_GetItemWithError(self->layouts, (PyObject *)Py_TYPE(arguments[1]));
    if (packed == NULL) {
        if (PyErr_Occurred()) return NULL;
        return PyObject_CallFunctionObjArgs(self->write_long, arguments[0], arguments[1], NULL);
    }
    const Layout *layout = (const Layout *)PyBytes_AsString(packed);
    if (layout->fields[0] == 'A') {
        if (write_attribute_set(self, layout->code, arguments[0], arguments[1])) Py_RETURN_NONE;
        return PyObject_CallFunctionObjArgs(self->write_long, arguments[0], arguments[1], NULL);
    }
    char middle[END_AT - CODE_AT] = {0};
    int at = BODY_AT - CODE_AT, size;
    middle[0] = (char)layout->code;
    middle[2] = 1;
    if (pack_number(middle + HANDLE_AT - CODE_AT, 'I', arguments[0], &size)) return NULL;
    if (PyTuple_Size(arguments[1]) != layout->count) {
        if (!PyErr_Occurred()) fail_range();
        return NULL;
    }
    for (int i = 0; i < layout->count; i++) {
        if (pack_field(self, middle + at, layout->fields[i], PyTuple_GetItem(arguments[1], i), &size)) return NULL;
        at += size;
    }
    store_next_cell(self, middle);
    Py_RETURN_NONE;
}

void write_cell(RequestRing *ring, int code, uint32_t handle, const char *body)
{
    char middle[END_AT - CODE_AT] = {0};
    middle[0] = (char)code;
    middle[2] = 1;
    memcpy(middle + HANDLE_AT - CODE_AT, &handle, 4);
    memcpy(middle + BODY_AT - CODE_AT, body, END_AT - BODY_AT);
    store_next_cell(ring, middle);
}

int intern_text(RequestRing *ring, PyObject *text, uint32_t *id)
{
    int size;
    return pack_text(ring, (char *)id, 'S', text, &size);
}

/* Live slot: handle, flags, 0, arrived_at, wall_at, trace, span, parent and server id, 0, handle (`layout.LIVE`). */
enum { LIVE_BYTES = 80, LIVE_END_AT = 72, FLAGS_AT = 56, SLOT_BITS = 12, GENERATIONS = 1 << 20 };
enum { JOINED = 16 };  /* `events.JOINED` */

static uint64_t *header_word(RequestRing *self, int word)
{
    return (uint64_t *)self->memory.buf + word;
}

uint64_t count_offered(RequestRing *ring)
{
    return *header_word(ring, W_OFFERED);
}

void store_word(RequestRing *ring, int word, uint64_t value)
{
    *header_word(ring, word) = value;
}

/* Returns the handle of a free slot; 0 if there is none. The oldest is used first, so that generations repeat late. */
static uint32_t take_slot(RequestRing *self)
{
    if (self->in_flight >= self->slots) return 0;
    uint32_t slot = self->free_slots[self->first_free];
    self->first_free = (self->first_free + 1) % (uint32_t)self->slots;
    self->in_flight++;
    return slot | self->free_slots[self->slots + slot] << SLOT_BITS;
}

void free_slot(RequestRing *self, uint32_t handle)
{
    uint32_t slot = handle & ((1 << SLOT_BITS) - 1), *generations = self->free_slots + self->slots;
    if (!handle || slot >= self->slots || handle >> SLOT_BITS != generations[slot]) return;
    memset((char *)self->memory.buf + self->live_offset + slot * LIVE_BYTES, 0, LIVE_BYTES);
    generations[slot] = (generations[slot] + 1) % GENERATIONS;
    if (!generations[slot]) generations[slot] = 1;
    self->free_slots[(self->first_free + self->slots - self->in_flight) % self->slots] = slot;
    self->in_flight--;
}

/* Writes the live slot and the two cells of an arrival, then counts the request as offered. Returns its handle. */
static uint32_t store_arrival(RequestRing *self, const char *body)
{
    uint32_t handle = take_slot(self);
    int joined = body[FLAGS_AT] & JOINED;
    if (!handle) {
        ++*header_word(self, W_UNRECORDED);
        if (!joined) ++*header_word(self, W_NOT_RECORDED);
    } else {
        char live[LIVE_BYTES] = {0};
        memcpy(live, &handle, 4);
        memcpy(live + 4, body + FLAGS_AT, 2);
        memcpy(live + 8, body, FLAGS_AT);
        memcpy(live + LIVE_END_AT, &handle, 4);
        uint32_t slot = handle & ((1 << SLOT_BITS) - 1);
        memcpy((char *)self->memory.buf + self->live_offset + slot * LIVE_BYTES, live, LIVE_BYTES);
        uint64_t cell = self->next_cell;
        self->next_cell = cell + 2;
        LongEvent arrival = {self->arrival_code, 2, handle, (uint32_t)(cell + 1)};
        store_part(self, cell, arrival, 0, body, PART_BYTES);
        store_part(self, cell + 1, arrival, 1, body + PART_BYTES, PART_BYTES);
    }
    if (!joined) ++*header_word(self, W_OFFERED);
    return handle;
}

static PyObject *open_request(RequestRing *self, PyObject *arrived)
{
    static const char fields[] = "qqXxxxHTTTT";  /* `events.RequestArrived` */
    char body[2 * PART_BYTES] = {0};
    int at = 0, size;
    for (int i = 0; fields[i]; i++) {
        PyObject *value = PyTuple_GetItem(arrived, i);
        if (value == NULL || pack_field(self, body + at, fields[i], value, &size)) return NULL;
        at += size;
    }
    return PyLong_FromUnsignedLong(store_arrival(self, body));
}

static PyObject *close_request(RequestRing *self, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *written = write_event(self, arguments, count);
    if (count == 2) {
        uint64_t handle = PyLong_AsUnsignedLongLong(arguments[0]);
        if (handle <= UINT32_MAX) free_slot(self, (uint32_t)handle);
        else if (written != NULL) { Py_CLEAR(written); PyErr_Clear(); fail_range(); }
    }
    return written;
}

/* ── requests below a remote parent ─────────────────────────────────────────────────────────────────────────── */

static uint64_t next_random(RequestRing *self)  /* xoshiro256**, by Blackman and Vigna (public domain) */
{
    uint64_t *s = self->random, mixed = s[1] * 5, shifted = s[1] << 17;
    mixed = (mixed << 7 | mixed >> 57) * 9;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = s[3] << 45 | s[3] >> 19;
    return mixed;
}

static void fill_random_id(RequestRing *self, char *id)
{
    uint64_t number;
    do number = next_random(self);
    while (!number);
    memcpy(id, &number, 8);
}

enum { TRACEPARENT = 55 };

static int read_hex(char digit)  /* lower case only, as the W3C demands */
{
    if (digit >= '0' && digit <= '9') return digit - '0';
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* Reads version, trace id, span id and flags of a `traceparent` of version 00. */
static int read_traceparent(const char *text, Py_ssize_t length, char *parent)
{
    static const char none[16] = {0};
    if (length != TRACEPARENT || memcmp(text, "00-", 3) || text[35] != '-' || text[52] != '-') return NOT_PLAIN;
    for (int from = 0, to = 0; to < PARENT_BYTES; to++, from += 2) {
        if (from == 2 || from == 35 || from == 52) from++;
        int high = read_hex(text[from]), low = read_hex(text[from + 1]);
        if (high < 0 || low < 0) return NOT_PLAIN;
        parent[to] = (char)(high << 4 | low);
    }
    if (!memcmp(parent + 1, none, 16) || !memcmp(parent + 17, none, 8)) return NOT_PLAIN;
    return HAS_PARENT;
}

/* Looks for a lone `traceparent` among ASGI headers. NOT_PLAIN: the propagators must read them. */
static int find_parent(PyObject *headers, char *parent)
{
    int found = HAS_NO_PARENT;
    Py_ssize_t count = PyList_Size(headers), length;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GetItem(headers, i);
        char *text;
        if (PyTuple_Check(pair) ? PyTuple_Size(pair) != 2 : 1) return NOT_PLAIN;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 0), &text, &length)) { PyErr_Clear(); return NOT_PLAIN; }
        if ((length == 7 && !memcmp(text, "baggage", 7)) || (length == 10 && !memcmp(text, "tracestate", 10)))
            return NOT_PLAIN;
        if (length != 11 || memcmp(text, "traceparent", 11)) continue;
        if (found != HAS_NO_PARENT) return NOT_PLAIN;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(pair, 1), &text, &length)) { PyErr_Clear(); return NOT_PLAIN; }
        found = read_traceparent(text, length, parent);
        if (found == NOT_PLAIN) return NOT_PLAIN;
    }
    return found;
}

enum { SAMPLED = 1, REMOTE_PARENT = 2 };  /* `events.SAMPLED`, `events.REMOTE_PARENT` */

/* Writes the arrival of a request whose other ids and names are in `body`. */
static void store_opened(RequestRing *self, char *body, int64_t at, uint16_t flags, OpenedRequest *opened)
{
    struct timespec wall;
    fill_random_id(self, body + 32);
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t wall_at = (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec - read_clock() + at;
    memcpy(body, &at, 8);
    memcpy(body + 8, &wall_at, 8);
    memcpy(body + FLAGS_AT, &flags, 2);
    memcpy(opened->trace, body + 16, 40);
    opened->flags = flags;
    opened->handle = store_arrival(self, body);
}

int open_by_headers(RequestRing *self, PyObject *headers, PyObject *name, int64_t at, uint16_t flags,
                    int root_sampled, int follows_parent, OpenedRequest *opened)
{
    char body[2 * PART_BYTES] = {0};
    int size, found = PyList_Check(headers) ? find_parent(headers, opened->remote) : NOT_PLAIN;
    if (found == NOT_PLAIN) return 1;
    if (pack_text(self, body + FLAGS_AT + 8, 'T', name, &size)) return -1;
    opened->has_remote = found == HAS_PARENT;
    if (found == HAS_PARENT) {
        flags |= REMOTE_PARENT;
        if (follows_parent) root_sampled = opened->remote[25] & 1;
        memcpy(body + 16, opened->remote + 1, 16);
        memcpy(body + 40, opened->remote + 17, 8);
    } else {
        fill_random_id(self, body + 16);
        fill_random_id(self, body + 24);
    }
    fill_random_id(self, body + 48);
    store_opened(self, body, at, root_sampled ? flags | SAMPLED : flags, opened);
    return 0;
}

int open_root(RequestRing *self, PyObject *const *names, int64_t at, uint16_t flags, int root_sampled,
              OpenedRequest *opened)
{
    char body[2 * PART_BYTES] = {0};
    int size;
    for (int i = 0; i < 4; i++)
        if (pack_text(self, body + FLAGS_AT + 2 + 2 * i, 'T', names[i], &size)) return -1;
    fill_random_id(self, body + 16);
    fill_random_id(self, body + 24);
    store_opened(self, body, at, root_sampled ? flags | SAMPLED : flags, opened);
    return 0;
}

/* open_below_remote(headers, name, at, flags, root_sampled, follows_parent) */
static PyObject *open_below_remote(RequestRing *self, PyObject *const *arguments, Py_ssize_t count)
{
    OpenedRequest opened = {0};
    if (count != 6) return PyErr_Format(PyExc_TypeError, "open_below_remote takes 6 arguments");
    int64_t at = PyLong_AsLongLong(arguments[2]);
    uint16_t flags = (uint16_t)PyLong_AsLong(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    int failed = open_by_headers(self, arguments[0], arguments[1], at, flags, arguments[4] == Py_True,
                                 arguments[5] == Py_True, &opened);
    if (failed < 0) return NULL;
    if (failed) Py_RETURN_NONE;
    return Py_BuildValue("I(y#y#y#y#)Hy#", opened.handle, opened.trace, (Py_ssize_t)16, opened.span, (Py_ssize_t)8,
                         opened.parent, (Py_ssize_t)8, opened.server, (Py_ssize_t)8, opened.flags, opened.remote,
                         (Py_ssize_t)(opened.has_remote ? PARENT_BYTES : 0));
}

static PyObject *next_cell(RequestRing *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(self->next_cell++);
}

static PyObject *forget_texts(RequestRing *self, PyObject *unused)
{
    (void)unused;
    for (int i = 0; i < KNOWN_TEXTS; i++) Py_CLEAR(self->known_texts[i]);
    Py_RETURN_NONE;
}

static int add_layout(PyObject *layouts, PyObject *event, PyObject *described)
{
    Layout layout = {0};
    int code;
    const char *fields;
    if (!PyArg_ParseTuple(described, "is", &code, &fields)) return -1;
    size_t count = strlen(fields);
    if (count > MAX_FIELDS) return fail_range();
    layout.code = (uint8_t)code;
    layout.count = (uint8_t)count;
    memcpy(layout.fields, fields, count);
    PyObject *packed = PyBytes_FromStringAndSize((const char *)&layout, sizeof layout);
    int failed = packed == NULL || PyDict_SetItem(layouts, event, packed);
    Py_XDECREF(packed);
    return failed ? -1 : 0;
}

static int init_request_ring(RequestRing *self, PyObject *arguments, PyObject *named)
{
    PyObject *memory, *described, *event, *fields, *strings, *intern, *write_long;
    unsigned long long cells;
    unsigned int generation;
    const char *seed;
    Py_ssize_t position = 0, seed_length;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "OKLLIy#OiO!OO", &memory, &cells, &self->live_offset, &self->slots, &generation,
                          &seed, &seed_length, &described, &self->arrival_code, &PyDict_Type, &strings, &intern,
                          &write_long)) return -1;
    self->strings = strings;
    self->intern = intern;
    self->write_long = write_long;
    Py_INCREF(strings);
    Py_INCREF(intern);
    Py_INCREF(write_long);
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    self->cells = cells;
    if (!cells || seed_length != sizeof self->random || self->slots <= 0 || self->slots > 1 << SLOT_BITS ||
        PAGE + cells * CELL_BYTES > (uint64_t)self->live_offset ||
        self->live_offset + self->slots * LIVE_BYTES > self->memory.len) return fail_range();
    memcpy(self->random, seed, sizeof self->random);
    self->random[0] |= 1;  /* all zeros would stay zeros */
    self->free_slots = PyMem_Malloc(2 * self->slots * sizeof(uint32_t));
    if (self->free_slots == NULL) { PyErr_NoMemory(); return -1; }
    for (uint32_t slot = 0; slot < self->slots; slot++) {
        self->free_slots[slot] = slot;
        self->free_slots[self->slots + slot] = generation;
    }
    self->layouts = PyDict_New();
    if (self->layouts == NULL) return -1;
    while (PyDict_Next(described, &position, &event, &fields))
        if (add_layout(self->layouts, event, fields)) return -1;
    return 0;
}

static int visit_request_ring(RequestRing *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->layouts);
    Py_VISIT(self->strings);
    Py_VISIT(self->intern);
    Py_VISIT(self->write_long);
    for (int i = 0; i < KNOWN_TEXTS; i++) Py_VISIT(self->known_texts[i]);
    return 0;
}

static int clear_request_ring(RequestRing *self)
{
    Py_CLEAR(self->layouts);
    Py_CLEAR(self->strings);
    Py_CLEAR(self->intern);
    Py_CLEAR(self->write_long);
    for (int i = 0; i < KNOWN_TEXTS; i++) Py_CLEAR(self->known_texts[i]);
    return 0;
}

static void free_request_ring(RequestRing *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    clear_request_ring(self);
    if (self->memory.obj != NULL) PyBuffer_Release(&self->memory);
    PyMem_Free(self->free_slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef request_ring_methods[] = {
    {"write_event", (PyCFunction)(void (*)(void))write_event, METH_FASTCALL,
     "write_event(handle, event): writes one request event; raises for an event that does not fit its layout."},
    {"open_request", (PyCFunction)open_request, METH_O,
     "open_request(arrived): writes an arrival and returns the request's handle, 0 = no free slot."},
    {"open_below_remote", (PyCFunction)(void (*)(void))open_below_remote, METH_FASTCALL,
     "open_below_remote(headers, name, at, flags, root_sampled, follows_parent): opens a request below an own SERVER\n"
     "span. Returns handle, ids, flags and remote parent; None if the propagators must read the headers."},
    {"close_request", (PyCFunction)(void (*)(void))close_request, METH_FASTCALL,
     "close_request(handle, ended): writes the end of a request and frees its slot."},
    {"forget_texts", (PyCFunction)forget_texts, METH_NOARGS, "forget_texts(): ids of texts are looked up again."},
    {"next_cell", (PyCFunction)next_cell, METH_NOARGS, "next_cell(): reserves a cell and returns its number, from 0."},
    {NULL, NULL, 0, NULL}};

static PyMemberDef request_ring_members[] = {
    {"in_flight", T_LONGLONG, offsetof(RequestRing, in_flight), READONLY, NULL},
    {"deferred_due_at", T_LONGLONG, offsetof(RequestRing, deferred_due_at), 0, NULL},
    {"retired", T_BOOL, offsetof(RequestRing, retired), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot request_ring_slots[] = {{Py_tp_init, init_request_ring},
                                           {Py_tp_new, PyType_GenericNew},
                                           {Py_tp_dealloc, free_request_ring},
                                           {Py_tp_traverse, visit_request_ring},
                                           {Py_tp_clear, clear_request_ring},
                                           {Py_tp_methods, request_ring_methods},
                                           {Py_tp_members, request_ring_members},
                                           {0, NULL}};
static PyTypeObject *request_ring_type;
static PyType_Spec request_ring_spec = {"otel_infer.ringbuffer._native.RequestRing", sizeof(RequestRing), 0,
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, request_ring_slots};

int is_ring(PyObject *object)
{
    return object != NULL && Py_TYPE(object) == request_ring_type;
}

/* ── step ring ──────────────────────────────────────────────────────────────────────────────────────────────── */

static PyTypeObject *step_ring_type;

StepRing *get_step_ring(PyObject *object)
{
    StepRing *ring = object != NULL && PyObject_TypeCheck(object, step_ring_type) ? (StepRing *)object : NULL;
    return ring == NULL || ring->retired ? NULL : ring;
}

/* Stores a record of one cell: counter, length and code, body, counter (`step_writer.pack_unchanged`). */
static void store_record(StepRing *self, const char *middle)
{
    long long offset = self->offset;
    self->offset = offset < self->last_offset ? offset + CELL_BYTES : PAGE;
    store_cell(self->cells + offset, (uint64_t)++self->cells_written, middle);
}

static int read_numbers(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t wanted, long long *numbers)
{
    if (count != wanted) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsLongLong(arguments[i]);
        if (numbers[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Makes the next step a keyframe if the last one is too old, or the reader requests one. */
static void check_keyframe(StepRing *self, int64_t at)
{
    long long requests = *(volatile long long *)(self->cells + 8 * W_KEYFRAME_REQUESTED);
    self->next_check_at = at + self->check_interval;
    if (at >= self->next_keyframe_at || requests != self->keyframe_requests) {
        self->keyframe_requests = requests;
        self->next_keyframe_step = 0;
    }
}

long long store_unchanged(StepRing *self, const long long *numbers, int64_t at)
{
    long long step = self->step + 1;
    if (at >= self->next_check_at) check_keyframe(self, at);
    if (step >= self->next_keyframe_step || numbers[0] != self->size) return 0;
    char middle[END_AT - CODE_AT] = {0};
    uint64_t numbered = (uint64_t)step;
    memcpy(middle, &self->scheduled_word, 4);
    memcpy(middle + 4, &at, 8);
    memcpy(middle + 12, &numbered, 8);
    for (int i = 0; i < 5; i++) {
        if (numbers[i] < 0 || numbers[i] > UINT32_MAX) return fail_range();
        uint32_t number = (uint32_t)numbers[i];
        memcpy(middle + 28 + 4 * i, &number, 4);
    }
    self->step = step;
    store_record(self, middle);
    return step;
}

static PyObject *write_unchanged(StepRing *self, PyObject *const *arguments, Py_ssize_t count)
{
    long long numbers[6] = {0};  /* those of `store_unchanged`, instant */
    if (read_numbers(arguments, count, count == 5 ? 5 : 6, numbers)) return NULL;
    long long step = store_unchanged(self, numbers, numbers[5] ? numbers[5] : read_clock());
    return step < 0 ? NULL : PyLong_FromLongLong(step);
}

static PyObject *check_keyframe_now(StepRing *self, PyObject *instant)
{
    long long at = PyLong_AsLongLong(instant);
    if (at == -1 && PyErr_Occurred()) return NULL;
    check_keyframe(self, at);
    Py_RETURN_NONE;
}

void store_single_tokens(StepRing *self, long long step, int64_t at, uint32_t discarded)
{
    char middle[END_AT - CODE_AT] = {0};
    memcpy(middle, &self->done_word, 4);
    memcpy(middle + 4, &at, 8);
    memcpy(middle + 12, &step, 8);
    memcpy(middle + 28, &discarded, 4);
    store_record(self, middle);
}

static PyObject *write_single_tokens(StepRing *self, PyObject *const *arguments, Py_ssize_t count)
{
    long long numbers[3] = {0};  /* step, instant, discarded */
    if (read_numbers(arguments, count, count == 2 ? 2 : 3, numbers)) return NULL;
    if (numbers[2] < 0 || numbers[2] > UINT32_MAX) { fail_range(); return NULL; }
    store_single_tokens(self, numbers[0], numbers[1] ? numbers[1] : read_clock(), (uint32_t)numbers[2]);
    Py_RETURN_NONE;
}

/* ── changes of a batch ─────────────────────────────────────────────────────────────────────────────────────── */

enum { SCHEDULED_HEAD = 44, OVERHEAD = 20 };  /* bytes of `events.SCHEDULED_HEAD`; counter, length and code, counter */

static int count_cells(int words)
{
    return (OVERHEAD + SCHEDULED_HEAD + 4 * words + CELL_BYTES - 1) / CELL_BYTES;
}

int takes_change(StepRing *ring, int words, int64_t at)
{
    if (at >= ring->next_check_at) check_keyframe(ring, at);
    return ring->step + 1 < ring->next_keyframe_step &&
           ring->offset + count_cells(words) * CELL_BYTES <= ring->last_offset;
}

static void remove_handle(PyObject *handles, Py_ssize_t position)
{
    Py_ssize_t size = PyByteArray_Size(handles);
    char *bytes = PyByteArray_AsString(handles);
    memmove(bytes + 4 * position, bytes + 4 * position + 4, size - 4 * position - 4);
    PyByteArray_Resize(handles, size - 4);
}

static int remove_member(BatchState *batch, Py_ssize_t position)
{
    PyObject *key = PyLong_FromVoidPtr(PyList_GetItem(batch->members, position));
    int failed = key == NULL || PyDict_DelItem(batch->ordinal_of, key);
    Py_XDECREF(key);
    remove_handle(batch->packed_handles, position);
    return PyList_SetSlice(batch->ordinals, position, position + 1, NULL) ||
           PyList_SetSlice(batch->members, position, position + 1, NULL) || failed;
}

static int append_member(BatchState *batch, PyObject *member, uint32_t handle)
{
    Py_ssize_t size = PyByteArray_Size(batch->packed_handles);
    PyObject *key = PyLong_FromVoidPtr(member), *ordinal = PyLong_FromLongLong(batch->next_ordinal++);
    int failed = key == NULL || ordinal == NULL || PyByteArray_Resize(batch->packed_handles, size + 4) ||
                 PyDict_SetItem(batch->ordinal_of, key, ordinal) || PyList_Append(batch->ordinals, ordinal) ||
                 PyList_Append(batch->members, member);
    if (!failed) memcpy(PyByteArray_AsString(batch->packed_handles) + size, &handle, 4);
    Py_XDECREF(key);
    Py_XDECREF(ordinal);
    return failed;
}

long long store_change(StepRing *ring, BatchState *batch, const BatchChange *change, const long long *load, int64_t at)
{
    int words = change->left_count + change->joined_count + 2 * change->tokens_count, cells = count_cells(words);
    uint64_t counter = (uint64_t)ring->cells_written + 1, step = (uint64_t)ring->step + 1;
    uint32_t word = (ring->scheduled_word & 0xffff0000) | (uint32_t)(OVERHEAD + SCHEDULED_HEAD + 4 * words);
    uint16_t counts[3] = {(uint16_t)change->left_count, (uint16_t)change->joined_count, (uint16_t)change->tokens_count};
    uint32_t numbers[5] = {(uint32_t)change->size, (uint32_t)load[0], (uint32_t)load[1], (uint32_t)load[2],
                           (uint32_t)load[3]};
    char *to = ring->cells + ring->offset, *body = to + CODE_AT + 4 + SCHEDULED_HEAD;
    __atomic_store_n((uint64_t *)to, counter, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memset(to + CODE_AT, 0, cells * CELL_BYTES - CODE_AT - 8);
    memcpy(to + CODE_AT, &word, 4);
    memcpy(to + 12, &at, 8);
    memcpy(to + 20, &step, 8);
    memcpy(to + 30, counts, 6);
    memcpy(to + 36, numbers, 20);
    memcpy(body, change->left, 4 * change->left_count);
    memcpy(body + 4 * change->left_count, change->handles, 4 * change->joined_count);
    memcpy(body + 4 * (change->left_count + change->joined_count), change->tokens, 8 * change->tokens_count);
    __atomic_store_n((uint64_t *)(to + cells * CELL_BYTES - 8), counter, __ATOMIC_RELEASE);
    ring->offset += cells * CELL_BYTES;
    ring->cells_written += cells;
    ring->step = (long long)step;
    ring->size = (long long)change->size;
    int failed = 0;
    for (int i = 0; i < change->left_count; i++) failed |= remove_member(batch, change->left[i]);
    for (int i = 0; i < change->joined_count; i++)
        failed |= append_member(batch, change->after[change->size - change->joined_count + i], change->handles[i]);
    if (failed) ring->next_keyframe_step = 0;  /* out of memory: the next step writes all members */
    return (long long)step;
}

static PyTypeObject *batch_base;

BatchState *get_batch(PyObject *object)
{
    BatchState *batch = (BatchState *)object;
    if (object == NULL || !PyObject_TypeCheck(object, batch_base)) return NULL;
    if (batch->members == NULL || batch->packed_handles == NULL || batch->ordinals == NULL || batch->ordinal_of == NULL)
        return NULL;
    Py_ssize_t size = PyList_Check(batch->members) ? PyList_Size(batch->members) : -1;
    return PyList_Check(batch->ordinals) && PyDict_Check(batch->ordinal_of) && PyByteArray_Check(batch->packed_handles) &&
                   PyList_Size(batch->ordinals) == size && PyByteArray_Size(batch->packed_handles) == 4 * size
               ? batch
               : NULL;
}

static int visit_batch(BatchState *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->members);
    Py_VISIT(self->packed_handles);
    Py_VISIT(self->ordinals);
    Py_VISIT(self->ordinal_of);
    return 0;
}

static int clear_batch(BatchState *self)
{
    Py_CLEAR(self->members);
    Py_CLEAR(self->packed_handles);
    Py_CLEAR(self->ordinals);
    Py_CLEAR(self->ordinal_of);
    return 0;
}

static void free_batch(BatchState *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    clear_batch(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef batch_members[] = {
    {"_members", T_OBJECT, offsetof(BatchState, members), 0, NULL},
    {"_packed_handles", T_OBJECT, offsetof(BatchState, packed_handles), 0, NULL},
    {"_ordinals", T_OBJECT, offsetof(BatchState, ordinals), 0, NULL},
    {"_ordinal_of", T_OBJECT, offsetof(BatchState, ordinal_of), 0, NULL},
    {"_next_ordinal", T_LONGLONG, offsetof(BatchState, next_ordinal), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot batch_slots[] = {{Py_tp_new, PyType_GenericNew}, {Py_tp_dealloc, free_batch},
                                    {Py_tp_traverse, visit_batch},  {Py_tp_clear, clear_batch},
                                    {Py_tp_members, batch_members}, {0, NULL}};
static PyType_Spec batch_spec = {"otel_infer.ringbuffer._native.BatchState", sizeof(BatchState), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, batch_slots};

static int init_step_ring(StepRing *self, PyObject *arguments, PyObject *named)
{
    PyObject *memory;
    unsigned long scheduled, done;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "OLkkL", &memory, &self->last_offset, &scheduled, &done,
                          &self->check_interval)) return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
    if (self->last_offset < PAGE || self->last_offset + CELL_BYTES > self->memory.len) return fail_range();
    self->cells = self->memory.buf;
    self->offset = PAGE;
    self->scheduled_word = (uint32_t)scheduled;
    self->done_word = (uint32_t)done;
    return 0;
}

static void free_step_ring(StepRing *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->memory.obj != NULL) PyBuffer_Release(&self->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef step_ring_methods[] = {
    {"write_unchanged", (PyCFunction)(void (*)(void))write_unchanged, METH_FASTCALL,
     "write_unchanged(size, kv_used, kv_total, running, waiting, at=0): returns the step's number, 0 = nothing written."},
    {"check_keyframe", (PyCFunction)check_keyframe_now, METH_O,
     "check_keyframe(at): makes the next step a keyframe if the last one is too old, or the reader requests one."},
    {"write_single_tokens", (PyCFunction)(void (*)(void))write_single_tokens, METH_FASTCALL,
     "write_single_tokens(step, at, discarded=0): every member of the step got one token at `at`; 0 = now."},
    {NULL, NULL, 0, NULL}};

#define MEMBER(name) {#name, T_LONGLONG, offsetof(StepRing, name), 0, NULL}
static PyMemberDef step_ring_members[] = {
    MEMBER(cells_written), MEMBER(offset), MEMBER(last_offset), MEMBER(step), MEMBER(size),
    MEMBER(next_keyframe_step), MEMBER(next_keyframe_at), MEMBER(next_check_at), MEMBER(keyframe_requests),
    {"retired", T_BOOL, offsetof(StepRing, retired), 0, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot step_ring_slots[] = {{Py_tp_init, init_step_ring},
                                        {Py_tp_new, PyType_GenericNew},
                                        {Py_tp_dealloc, free_step_ring},
                                        {Py_tp_methods, step_ring_methods},
                                        {Py_tp_members, step_ring_members},
                                        {0, NULL}};
static PyType_Spec step_ring_spec = {"otel_infer.ringbuffer._native.StepRing", sizeof(StepRing), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, step_ring_slots};

/* ── module ─────────────────────────────────────────────────────────────────────────────────────────────────── */

int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    int failed = type == NULL || PyModule_AddObjectRef(module, name, type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static int fill_module(PyObject *module)
{
    const uint16_t one = 1;
    static int64_t home = -1;  /* the interpreter that has imported it: types and names are static */
    int64_t here = PyInterpreterState_GetID(PyInterpreterState_Get());
    if (home >= 0 && here != home) {
        PyErr_SetString(PyExc_ImportError, "the compiled module serves one interpreter");
        return -1;
    }
    home = here;
    if (*(const char *)&one != 1) {
        PyErr_SetString(PyExc_ImportError, "rings are little-endian");
        return -1;
    }
    request_ring_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &request_ring_spec, NULL);
    step_ring_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &step_ring_spec, NULL);
    batch_base = (PyTypeObject *)PyType_FromModuleAndSpec(module, &batch_spec, NULL);
    return request_ring_type == NULL || step_ring_type == NULL || batch_base == NULL ||
                   PyModule_AddObjectRef(module, "BatchState", (PyObject *)batch_base) ||
                   PyModule_AddObjectRef(module, "RequestRing", (PyObject *)request_ring_type) ||
                   PyModule_AddObjectRef(module, "StepRing", (PyObject *)step_ring_type) ||
                   add_request_state(module) || add_exchange_types(module) || add_hook_type(module) || add_transformers_types(module) ||
                   add_generation_types(module) || add_forward_types(module) || add_context_types(module) ||
                   add_queue_functions(module) || add_model_names(module) ||
                   add_lag_type(module) || add_socket_functions(module) || add_batch_types(module) ||
                   add_scheduler_types(module) || add_stall_types(module) || add_stack_signal(module)
               ? -1
               : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};
static PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, NULL, module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module_definition);
}
