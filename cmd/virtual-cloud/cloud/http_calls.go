package cloud

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

func (s *server) create(w http.ResponseWriter, r *http.Request) (request, error) {
	in, err := readJSON[cloudapi.CreateRequest](w, r)
	if err != nil {
		return request{}, err
	}

	return request{name: in.Name, do: func() (cloudapi.Instance, int, any, error) {
		i, existing, err := s.cloud.Create(in)
		status := http.StatusCreated
		if existing {
			status = http.StatusOK
		}

		return i, status, i, err
	}}, nil
}

func (s *server) list(_ http.ResponseWriter, r *http.Request) (request, error) {
	query := r.URL.Query()
	want, err := tags(query["tag"])
	if err != nil {
		return request{}, err
	}
	filter := cloudapi.Filter{Name: query.Get("name"), Tags: want}

	return request{do: func() (cloudapi.Instance, int, any, error) {
		return cloudapi.Instance{}, http.StatusOK, cloudapi.InstanceList{Instances: s.cloud.List(filter)}, nil
	}}, nil
}

func (s *server) get(_ http.ResponseWriter, r *http.Request) (request, error) {
	return s.byID(r, s.cloud.Get), nil
}

func (s *server) delete(_ http.ResponseWriter, r *http.Request) (request, error) {
	return s.byID(r, s.cloud.Delete), nil
}

func (s *server) initialize(_ http.ResponseWriter, r *http.Request) (request, error) {
	return s.byID(r, s.cloud.Initialize), nil
}

func (s *server) byID(r *http.Request, do func(id string) (cloudapi.Instance, error)) request {
	id := r.PathValue("id")

	return request{name: s.cloud.nameOf(id), do: func() (cloudapi.Instance, int, any, error) {
		i, err := do(id)

		return i, http.StatusOK, i, err
	}}
}

func (s *server) knobs(http.ResponseWriter, *http.Request) (any, error) { return s.cloud.Knobs(), nil }

func (s *server) patchKnobs(w http.ResponseWriter, r *http.Request) (any, error) {
	patch, err := readJSON[cloudapi.KnobsPatch](w, r)
	if err != nil {
		return nil, err
	}

	return s.cloud.Patch(patch)
}

func (s *server) release(w http.ResponseWriter, r *http.Request) (any, error) {
	in, err := readJSON[cloudapi.ReleaseRequest](w, r)
	if err != nil {
		return nil, err
	}
	n, err := s.cloud.Release(in.Name)

	return cloudapi.ReleaseResponse{Released: n}, err
}

func (s *server) tokens(w http.ResponseWriter, r *http.Request) (any, error) {
	in, err := readJSON[cloudapi.TokensRequest](w, r)
	if err != nil {
		return nil, err
	}
	if slices.Contains(in.Tokens, "") {
		return nil, refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "a token is empty")
	}
	if err := s.cloud.noteTokens(len(in.Tokens)); err != nil {
		return nil, err
	}
	s.guard.replace(in.Tokens)

	return struct{}{}, nil
}

func (s *server) stats(http.ResponseWriter, *http.Request) (any, error) { return s.cloud.Stats(), nil }

func (s *server) log(w http.ResponseWriter, r *http.Request) {
	if !s.guard.mayAdminister(r) {
		writeError(w, unauthorized())

		return
	}
	var after uint64
	if text := r.URL.Query().Get("after"); text != "" {
		var err error
		if after, err = strconv.ParseUint(text, 10, 64); err != nil {
			writeError(w, refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "after=%q is not a number", text))

			return
		}
	}
	w.Header().Set("Content-Type", "application/jsonl")
	encoder := json.NewEncoder(w)
	for _, e := range s.cloud.Log(after) {
		if encoder.Encode(e) != nil { //nolint:errchkjson // fails only when the client has gone
			return
		}
	}
}

// nameOf returns the name of a live instance, or "".
func (c *Cloud) nameOf(id string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i, ok := c.instances[id]; ok {
		return i.Name
	}

	return ""
}

// noteTokens logs that n tokens will replace the current ones.
func (c *Cloud) noteTokens(n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.record(cloudapi.LogEntry{
		Op: cloudapi.LogTokens, Event: cloudapi.EventChanged, Detail: strconv.Itoa(n) + " accepted",
	}); err != nil {
		return err
	}

	return nil
}
