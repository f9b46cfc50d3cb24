package cloud

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// maxBody leaves room for 1 MiB of user data in base64.
const maxBody = 2 << 20

// server is the HTTP API of one cloud.
type server struct {
	cloud *Cloud
	guard *guard
}

// NewHandler returns a handler of the API that package cloudapi describes. Calls need
// apiToken as a bearer token unless it is empty. Admin calls need that token even after
// the API's tokens were replaced.
func NewHandler(c *Cloud, apiToken string) http.Handler {
	s := &server{cloud: c, guard: newGuard(apiToken)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("POST /v1/instances", s.api(cloudapi.OpCreate, s.create))
	mux.HandleFunc("GET /v1/instances", s.api(cloudapi.OpList, s.list))
	mux.HandleFunc("GET /v1/instances/{id}", s.api(cloudapi.OpGet, s.get))
	mux.HandleFunc("DELETE /v1/instances/{id}", s.api(cloudapi.OpDelete, s.delete))
	mux.HandleFunc("POST /v1/instances/{id}/initialize", s.api(cloudapi.OpInitialize, s.initialize))
	s.registerPools(mux)
	mux.HandleFunc("GET /v1/admin/knobs", s.admin(s.knobs))
	mux.HandleFunc("PATCH /v1/admin/knobs", s.admin(s.patchKnobs))
	mux.HandleFunc("POST /v1/admin/release", s.admin(s.release))
	mux.HandleFunc("POST /v1/admin/tokens", s.admin(s.tokens))
	mux.HandleFunc("GET /v1/admin/stats", s.admin(s.stats))
	mux.HandleFunc("GET /v1/admin/log", s.log)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, refusal(http.StatusNotFound, cloudapi.CodeNotFound, "there is no call %s %s", r.Method, r.URL.Path))
	})

	return mux
}

// A request is an API call that has been read: the instance's name, if it is known, and
// the function that does the work.
type request struct {
	name string
	do   func() (instance cloudapi.Instance, status int, body any, err error)
}

// api serves one operation: it checks the token and the rate limit, applies faults, and
// does the work.
func (s *server) api(op string, read func(http.ResponseWriter, *http.Request) (request, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.guard.mayCall(r) {
			s.cloud.count(unauthorized())
			writeError(w, unauthorized())

			return
		}
		if err := s.cloud.admit(op); err != nil {
			writeError(w, err)

			return
		}
		req, err := read(w, r)
		if err != nil {
			s.cloud.count(asError(err))
			writeError(w, err)

			return
		}
		fault := s.cloud.faultFor(op, req.name)
		if fault != nil && !fault.After {
			writeFault(w, fault)

			return
		}
		// The work continues if the client disconnects, so it does not use r's context.
		instance, status, body, err := req.do()
		entry := cloudapi.LogEntry{
			Op: op, Name: req.name, ID: instance.ID, MachineUID: instance.Tags[cloudapi.TagMachineUID],
		}
		switch {
		case fault != nil:
			s.cloud.logLateFault(fault, entry)
			writeFault(w, fault)
		case err != nil:
			writeError(w, err)
		default:
			if r.Context().Err() != nil && r.Method != http.MethodGet {
				s.cloud.clientGone(entry)
			}
			writeJSON(w, status, body)
		}
	}
}

// admin serves one admin call.
func (s *server) admin(do func(http.ResponseWriter, *http.Request) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !s.guard.mayAdminister(r) {
			writeError(w, unauthorized())

			return
		}
		body, err := do(w, r)
		if err != nil {
			writeError(w, err)

			return
		}
		writeJSON(w, http.StatusOK, body)
	}
}

// count counts a refusal that happened before the cloud was called.
func (c *Cloud) count(err *cloudapi.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Refused[err.Code]++
}

func (c *Cloud) clientGone(entry cloudapi.LogEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.note(with(entry, cloudapi.EventClientGone))
}

// readJSON decodes a body strictly. Its errors name fields and never quote values, which
// may be user data.
func readJSON[T any](w http.ResponseWriter, r *http.Request) (T, error) {
	var in T
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil {
		return in, badBody(err)
	}
	// Read to the end: only then does the server notice that a client has disconnected.
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return in, badBody(cmp.Or(err, errors.New("data after the object")))
	}

	return in, nil
}

func badBody(err error) *cloudapi.Error {
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return refusal(http.StatusRequestEntityTooLarge, cloudapi.CodeRequestTooLarge,
			"the body is larger than %d bytes", tooLarge.Limit)
	}
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument,
			"the body: field %q must be of type %s", wrongType.Field, wrongType.Type)
	}

	return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "the body is invalid: %v", err)
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) //nolint:errchkjson // fails only when the client has gone
}

func asError(err error) *cloudapi.Error {
	if e, ok := errors.AsType[*cloudapi.Error](err); ok {
		return e
	}

	return refusal(http.StatusInternalServerError, cloudapi.CodeInternal, "%v", err)
}

func writeError(w http.ResponseWriter, err error) {
	e := asError(err)
	var body cloudapi.ErrorBody
	body.Error.Code, body.Error.Message, body.Error.InstanceID = e.Code, e.Message, e.InstanceID
	if e.RetryAfter > 0 {
		body.Error.RetryAfter = cloudapi.Duration(e.RetryAfter)
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	if e.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	writeJSON(w, e.Status, body)
}

func writeFault(w http.ResponseWriter, f *cloudapi.Fault) {
	if f.Drop {
		panic(http.ErrAbortHandler) //nolint:forbidigo // makes net/http close the connection without an answer
	}
	writeError(w, faultError(f))
}

// tags parses "tag=key=value" parameters.
func tags(values []string) (map[string]string, error) {
	tags := map[string]string{}
	for _, v := range values {
		key, value, ok := strings.Cut(v, "=")
		if !ok {
			return nil, refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "tag %q is not key=value", v)
		}
		tags[key] = value
	}

	return tags, nil
}
