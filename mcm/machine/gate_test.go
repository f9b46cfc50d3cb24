package machine_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
)

// A gate is the manager's way to an API server. It can be cut, and keep single
// requests and the watches of a resource waiting.
type gate struct {
	mu    sync.Mutex
	cut   bool
	held  map[string]chan struct{} // by "PATCH machines/status", or "WATCH nodes"; closed by release
	fails map[string]bool          // by method and path: answered as by an API server whose webhook fails
	asked map[string]int           // by the same, and by method and path
}

func newGate() *gate {
	return &gate{held: map[string]chan struct{}{}, fails: map[string]bool{}, asked: map[string]int{}}
}

var errCut = errors.New("the network is away")

// setCut cuts the way, or mends it. Watches then end at the next news.
func (g *gate) setCut(cut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut = cut
}

func (g *gate) hold(what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held[what] = make(chan struct{})
}

func (g *gate) release(what string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.held[what])
	delete(g.held, what)
}

// fail has the API server answer requests of a method for a machine's status with an
// internal error, or not any more.
func (g *gate) fail(method string, m *v1alpha1.Machine, fails bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fails[method+" /apis/"+v1alpha1.SchemeGroupVersion.String()+"/namespaces/"+m.Namespace+"/machines/"+m.Name+"/status"] = fails
}

// internalError is what an API server answers whose webhook fails.
func internalError(req *http.Request) *http.Response {
	const body = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500,` +
		`"message":"Internal error occurred: failed calling webhook"}`

	return &http.Response{
		StatusCode: http.StatusInternalServerError, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(body)), Request: req,
	}
}

// count returns how many such requests have come to the gate.
func (g *gate) count(what string) int {
	g.mu.Lock()
	defer g.mu.Unlock()

	return g.asked[what]
}

// through returns when a request, or news of one, may pass.
func (g *gate) through(ctx context.Context, what string) error {
	g.mu.Lock()
	cut, held := g.cut, g.held[what]
	g.mu.Unlock()
	if cut {
		return errCut
	}
	if held == nil {
		return nil
	}
	select {
	case <-held:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// wrap is for a rest.Config.
func (g *gate) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(req *http.Request) (*http.Response, error) {
		what := req.Method + " " + resourceOf(req.URL.Path)
		g.mu.Lock()
		g.asked[what]++
		g.asked[req.Method+" "+req.URL.Path]++
		fails := g.fails[req.Method+" "+req.URL.Path]
		g.mu.Unlock()
		if fails {
			return internalError(req), nil
		}
		watches := req.URL.Query().Has("watch")
		if watches {
			what = "WATCH " + resourceOf(req.URL.Path)
		} else if err := g.through(req.Context(), what); err != nil {
			return nil, err
		}
		resp, err := next.RoundTrip(req)
		if err == nil && watches {
			resp.Body = &gatedBody{resp.Body, func() error { return g.through(req.Context(), what) }}
		}

		return resp, err
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// A gatedBody is a watch.
type gatedBody struct {
	io.ReadCloser

	through func() error
}

func (b *gatedBody) Read(buf []byte) (int, error) {
	n, err := b.ReadCloser.Read(buf)
	if lost := b.through(); lost != nil {
		return 0, lost
	}

	return n, err
}

// resourceOf returns "nodes" or "machines/status", say, of a path like
// /apis/GROUP/VERSION/namespaces/NAMESPACE/RESOURCE/NAME/SUBRESOURCE.
func resourceOf(path string) string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	start := map[string]int{"api": 2, "apis": 3}[parts[0]]
	if len(parts) > start+2 && parts[start] == "namespaces" {
		start += 2
	}
	if start == 0 || len(parts) <= start {
		return ""
	}
	if len(parts) > start+2 {
		return parts[start] + "/" + parts[start+2]
	}

	return parts[start]
}
