package driversdk

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// A specDecoder turns the JSON of a providerSpec into S.
type specDecoder[S any] struct {
	kind        string   // empty takes any
	apiVersions []string // none takes any
}

// decode is strict: a field that S does not have, in exactly this spelling, is
// an InvalidArgument that names its path. An S with an UnmarshalJSON of its own
// does its own checking. S's Validate method has the last word.
func (d specDecoder[S]) decode(raw []byte) (S, error) {
	var spec, none S
	if len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		raw = []byte("{}")
	}
	tree, err := parse(raw)
	if err != nil {
		return none, Errorf(InvalidArgument, "providerSpec is not JSON: %w", err)
	}
	object, ok := tree.(map[string]any)
	if !ok {
		return none, Errorf(InvalidArgument, "providerSpec: want an object, have %s", jsonKind(tree))
	}
	if err := d.checkType(object); err != nil {
		return none, err
	}
	// The two name the type and are the SDK's: S need not have them.
	delete(object, "apiVersion")
	delete(object, "kind")
	if unknown := unknownFields[S](object); len(unknown) > 0 {
		return none, Errorf(InvalidArgument, "unknown field %s: it is misspelt, or belongs to another version of the driver",
			strings.Join(unknown, ", "))
	}
	if err := json.Unmarshal(raw, &spec); err != nil {
		return none, NewError(InvalidArgument, mismatch(err))
	}
	if v, ok := any(&spec).(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return none, Errorf(InvalidArgument, "providerSpec: %w", err)
		}
	}

	return spec, nil
}

// parse reads one JSON value and nothing after it; numbers stay texts, so that
// large ones are not judged by float64.
func parse(raw []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is data after its end")
	}

	return tree, nil
}

func (d specDecoder[S]) checkType(object map[string]any) error {
	kind, _ := object["kind"].(string)
	version, _ := object["apiVersion"].(string)
	if d.kind != "" && kind != d.kind {
		return Errorf(InvalidArgument, "providerSpec.kind is %q, but this driver understands %q", kind, d.kind)
	}
	if len(d.apiVersions) > 0 && !slices.Contains(d.apiVersions, version) {
		return Errorf(InvalidArgument, "providerSpec.apiVersion is %q, but this driver understands %s",
			version, strings.Join(d.apiVersions, ", "))
	}

	return nil
}

// mismatch says where a value of the wrong type stands.
func mismatch(err error) error {
	var typeErr *json.UnmarshalTypeError
	if !errors.As(err, &typeErr) {
		return fmt.Errorf("providerSpec: %w", err)
	}
	path := "providerSpec"
	if typeErr.Field != "" {
		path += "." + typeErr.Field
	}

	return fmt.Errorf("%s: want %s, have %s", path, typeErr.Type, typeErr.Value)
}

func jsonKind(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case bool:
		return "a boolean"
	case json.Number:
		return "a number"
	case string:
		return "a text"
	case []any:
		return "a list"
	default:
		return "an object"
	}
}
