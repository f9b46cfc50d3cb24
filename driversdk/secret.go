package driversdk

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
)

// userDataKey is the key of a class's secret that holds user data.
const userDataKey = "userData"

// A Secret is what the secrets of a class hold, by key. However it is printed,
// logged or marshalled, only the keys and the lengths of the values show.
type Secret map[string][]byte

// Lengths returns the length of each value in bytes.
func (s Secret) Lengths() map[string]int {
	lengths := make(map[string]int, len(s))
	for key, value := range s {
		lengths[key] = len(value)
	}

	return lengths
}

// Format writes the lengths, whatever the verb: a String method would leave %d
// to print the bytes.
func (s Secret) Format(f fmt.State, _ rune) {
	fmt.Fprint(f, s.Lengths())
}

// LogValue returns the lengths.
func (s Secret) LogValue() slog.Value { return slog.AnyValue(s.Lengths()) }

// MarshalJSON writes the lengths.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.Lengths()) }

// UserData is what an instance is started with; it may hold a bootstrap token.
// However it is printed, logged or marshalled, only its length shows.
type UserData []byte

// Format writes the length, whatever the verb.
func (u UserData) Format(f fmt.State, _ rune) { fmt.Fprintf(f, "%d bytes", len(u)) }

// LogValue returns the length.
func (u UserData) LogValue() slog.Value { return slog.StringValue(fmt.Sprintf("%d bytes", len(u))) }

// MarshalJSON writes the length.
func (u UserData) MarshalJSON() ([]byte, error) {
	return json.Marshal(fmt.Sprintf("%d bytes", len(u)))
}

// scrubbed is the shortest secret value that is looked for in texts: shorter
// ones are words.
const scrubbed = 8

// A scrubber takes secret values out of texts that people will see. Drivers must
// not put them there, but cloud errors that quote a request do. The zero value
// changes nothing.
type scrubber struct{ secrets []string }

// newScrubber makes one that knows the given secrets.
func newScrubber(secret Secret, more ...string) scrubber {
	var s scrubber
	add := func(value string) {
		if value = strings.TrimSpace(value); len(value) >= scrubbed {
			s.secrets = append(s.secrets, value)
		}
	}
	for key, value := range secret {
		if key != userDataKey {
			add(string(value))
			add(base64.StdEncoding.EncodeToString(value)) // as in the JSON of a Secret
		}
	}
	for _, value := range more {
		add(value)
	}
	// The longest first: one may hold another.
	slices.SortFunc(s.secrets, func(a, b string) int { return len(b) - len(a) })

	return s
}

func (s scrubber) text(text string) string {
	for _, secret := range s.secrets {
		text = strings.ReplaceAll(text, secret, "[redacted]")
	}

	return text
}
