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

// maxBody holds 1 MiB of user data in base64, and the rest.
const maxBody = 2 << 20

// server is the HTTP API of one cloud.
type server struct {
	cloud *Cloud
	guard *guard
}

// NewHandler serves a cloud's API as package cloudapi describes it, to callers
// who present apiToken as a bearer token; an empty one lets everybody in. The
// admin's calls take that same token also after the API's tokens were replaced.
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

// A request is an API call that has been read: the instance's name, as far as it
// is known, and what to do.
type request struct {
	name string
	do   func() (instance cloudapi.Instance, status int, body any, err error)
}

// api serves one operation: who calls, how often, what goes wrong, and the work.
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
		fault := s.cloud.strike(op, req.name)
		if fault != nil && !fault.After {
			writeFault(w, fault)

			return
		}
		// The work does not end with the client, so r's context stays out of it.
		instance, status, body, err := req.do()
		entry := cloudapi.LogEntry{
			Op: op, Name: req.name, ID: instance.ID, MachineUID: instance.Tags[cloudapi.TagMachineUID],
		}
		switch {
		case fault != nil:
			s.cloud.struck(fault, entry)
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

// admin serves one call of the admin.
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

// count counts a refusal that happened before the cloud had a say.
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

// readJSON reads a body strictly. Its errors name fields and never repeat
// values: there may be user data among them.
func readJSON[T any](w http.ResponseWriter, r *http.Request) (T, error) {
	var in T
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&in); err != nil {
		return in, badBody(err)
	}
	// To the end, from where on the server notices that a client has gone.
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return in, badBody(cmp.Or(err, errors.New("there is something after the object")))
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

	return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "the body is not what this call takes: %v", err)
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
		panic(http.ErrAbortHandler) //nolint:forbidigo // how net/http is told to close the connection without an answer
	}
	writeError(w, faultError(f))
}

// tags reads "tag=key=value" parameters.
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
