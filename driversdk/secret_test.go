package driversdk

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRedaction(t *testing.T) {
	t.Parallel()
	const value = "correct-horse-battery"
	req := &Request[testSpec]{
		Machine:  Machine{Namespace: "ns", Name: "m1"},
		Class:    &Class[testSpec]{Namespace: "ns", Name: "c", Secret: Secret{"token": []byte(value), "userData": []byte(value)}},
		UserData: UserData(value), OperationID: "op",
	}
	printed := map[string]any{
		"request": req, "request value": *req, "class": req.Class, "class value": *req.Class,
		"secret": req.Class.Secret, "user data": req.UserData, "nested": map[string]any{"a": []any{req, *req.Class}},
	}
	leaks := func(text string) bool {
		for _, form := range []string{
			value, fmt.Sprintf("%x", value), fmt.Sprintf("%X", value), fmt.Sprintf("% x", value),
			strings.Trim(fmt.Sprintf("%d", []byte(value)), "[]"), "Y29ycmVjdC1ob3JzZS1iYXR0ZXJ5", // base64
			strings.TrimSuffix(strings.TrimPrefix(fmt.Sprintf("%#v", []byte(value)), "[]byte{"), "}"),
		} {
			if strings.Contains(text, form) {
				return true
			}
		}

		return false
	}
	for name, v := range printed {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "% x", "%d"} {
				if text := fmt.Sprintf(format, v); leaks(text) {
					t.Errorf("%s shows a secret: %s", format, text)
				}
			}
			marshalled, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			if leaks(string(marshalled)) {
				t.Errorf("JSON shows a secret: %s", marshalled)
			}
			var log bytes.Buffer
			slog.New(slog.NewTextHandler(&log, nil)).Info("x", "v", v)
			slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "v", v)
			if leaks(log.String()) {
				t.Errorf("slog shows a secret: %s", log.String())
			}
		})
	}
	if got, want := req.String(), "operation op attempt 0 of machine ns/m1 "+
		"(class ns/c with secret map[token:21 userData:21], user data 21 bytes)"; got != want {
		t.Errorf("want %q, have %q", want, got)
	}
}

func TestScrubber(t *testing.T) {
	t.Parallel()
	s := newScrubber(Secret{"a": []byte("a-long-secret\n"), "short": []byte("eu-1"), "userData": []byte("#cloud-config")}, "bootstrap-token")
	cases := map[string]struct{ reason, text, want string }{
		"secret":    {"without the newline that files end with", "at a-long-secret!", "at [redacted]!"},
		"more":      {"values from elsewhere", "x bootstrap-token", "x [redacted]"},
		"short":     {"words stay", "region eu-1", "region eu-1"},
		"user data": {"is a document, not a password", "#cloud-config", "#cloud-config"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := s.text(tc.text); got != tc.want {
				t.Errorf("%s: want %q, have %q", tc.reason, tc.want, got)
			}
		})
	}
}

func TestFill(t *testing.T) {
	t.Parallel()
	values := map[string]string{"<<TOKEN>>": "a&b", "<<TOKEN>>X": "longer", "<<NAME>>": "<<TOKEN>>", "": "never"}
	cases := map[string]struct{ reason, text, want string }{
		"plain":      {"as it is", "t=<<TOKEN>>;", "t=a&b;"},
		"escaped":    {"in URL query form, with its value in the same", "t=%3C%3CTOKEN%3E%3E", "t=a%26b"},
		"both":       {"each form, everywhere", "<<TOKEN>> %3C%3CTOKEN%3E%3E <<TOKEN>>", "a&b a%26b a&b"},
		"longest":    {"of two that begin alike", "<<TOKEN>>X", "longer"},
		"not twice":  {"what is filled in is not looked through", "<<NAME>>", "<<TOKEN>>"},
		"not ours":   {"an unknown placeholder stays", "<<OTHER>>", "<<OTHER>>"},
		"empty text": {"nothing", "", ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, string(fill([]byte(tc.text), values))); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}
}
