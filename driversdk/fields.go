package driversdk

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// encoding/json can refuse unknown fields, but names neither their path nor more
// than one, and takes fields in any spelling of upper and lower case. Kubernetes
// users know better, so the fields are looked up here.

// unknownFields returns the paths in a providerSpec that S has no field for, in
// order.
func unknownFields[S any](object map[string]any) []string {
	var unknown []string
	walk(reflect.TypeFor[S](), object, "providerSpec", func(path string) { unknown = append(unknown, path) })
	slices.Sort(unknown)

	return unknown
}

var (
	jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// walk follows a value along the type it will be decoded into. It stops where the two do
// not fit, which decoding reports.
func walk(t reflect.Type, value any, path string, report func(path string)) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if p := reflect.PointerTo(t); p.Implements(jsonUnmarshaler) || p.Implements(textUnmarshaler) {
		return
	}
	switch v := value.(type) {
	case map[string]any:
		walkObject(t, v, path, report)
	case []any:
		if t.Kind() != reflect.Slice && t.Kind() != reflect.Array {
			return
		}
		for i, element := range v {
			walk(t.Elem(), element, fmt.Sprintf("%s[%d]", path, i), report)
		}
	}
}

func walkObject(t reflect.Type, object map[string]any, path string, report func(path string)) {
	switch t.Kind() {
	case reflect.Map:
		for key, value := range object {
			walk(t.Elem(), value, path+"."+key, report)
		}
	case reflect.Struct:
		fields := map[string]reflect.Type{}
		collect(t, fields, nil)
		for key, value := range object {
			field, ok := fields[key]
			if !ok {
				report(path + "." + key)

				continue
			}
			walk(field, value, path+"."+key, report)
		}
	default:
	}
}

// collect adds the types of a struct's fields by their JSON names, those of embedded
// structs included; an outer field hides an embedded one.
func collect(t reflect.Type, fields map[string]reflect.Type, above []reflect.Type) {
	if slices.Contains(above, t) {
		return // a struct that embeds a pointer to itself
	}
	var embedded []reflect.Type
	for f := range t.Fields() {
		tag := f.Tag.Get("json")
		name, _, _ := strings.Cut(tag, ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		switch {
		case tag == "-":
		case f.Anonymous && name == "" && inner.Kind() == reflect.Struct:
			embedded = append(embedded, inner)
		case !f.IsExported():
		default:
			if name == "" {
				name = f.Name
			}
			if _, hidden := fields[name]; !hidden {
				fields[name] = f.Type
			}
		}
	}
	for _, e := range embedded {
		collect(e, fields, append(above, t))
	}
}
