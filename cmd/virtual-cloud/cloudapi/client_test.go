package cloudapi

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The cloud itself is tested with this client in package cloud; here is what no
// cloud of ours answers.

func TestErrors(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		reason string
		answer http.HandlerFunc
		want   *Error
	}{
		"ours": {
			reason: "the body's wait is finer than the header's",
			answer: func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "2")
				w.WriteHeader(http.StatusTooManyRequests)
				io.WriteString(w, `{"error": {"code": "RateLimited", "message": "why", "retryAfter": "1.5s", "instanceID": "i-1"}}`)
			},
			want: &Error{Status: 429, Code: "RateLimited", Message: "why", RetryAfter: 1500 * time.Millisecond, InstanceID: "i-1"},
		},
		"a proxy's": {
			reason: "an answer that is not the cloud's keeps its status and wait, and nothing of its page",
			answer: func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", "2")
				w.WriteHeader(http.StatusBadGateway)
				io.WriteString(w, "<html>")
			},
			want: &Error{Status: 502, Code: "HTTP", Message: "Bad Gateway", RetryAfter: 2 * time.Second},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(tc.answer)
			t.Cleanup(server.Close)
			client, err := NewClient(server.URL, "", WithHTTPClient(server.Client()))
			if err != nil {
				t.Fatal(err)
			}
			err = client.Delete(t.Context(), "i-1")
			got, ok := errors.AsType[*Error](err)
			if !ok {
				t.Fatalf("%s: %v is no *Error", tc.reason, err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}

func TestUnreadableAnswerIsNoRefusal(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "hello")
	}))
	t.Cleanup(server.Close)
	client, err := NewClient(server.URL, "", WithHTTPClient(server.Client()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Create(t.Context(), CreateRequest{Name: "m"}); err == nil || CodeOf(err) != "" {
		t.Errorf("%v, want an error without code", err)
	}
}

func TestEndpoints(t *testing.T) {
	t.Parallel()
	for endpoint, good := range map[string]bool{
		"http://127.0.0.1:1":            true,
		"https://cloud.example/prefix/": true,
		"":                              false,
		"127.0.0.1:1":                   false,
		"ftp://host":                    false,
		"http://":                       false,
		"http://user:hunter2@host":      false,
	} {
		_, err := NewClient(endpoint, "token")
		if (err == nil) != good {
			t.Errorf("endpoint %q: %v, want good %v", endpoint, err, good)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("endpoint %q: the error repeats the password", endpoint)
		}
	}
}

func TestPatchHasEveryKnob(t *testing.T) {
	t.Parallel()
	fields := func(of reflect.Type) map[string]string {
		tags := map[string]string{}
		for f := range of.Fields() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			tags[name] = strings.TrimPrefix(f.Type.String(), "*")
		}

		return tags
	}
	if diff := cmp.Diff(fields(reflect.TypeFor[Knobs]()), fields(reflect.TypeFor[KnobsPatch]())); diff != "" {
		t.Errorf("knobs and patch differ:\n%s", diff)
	}
}
