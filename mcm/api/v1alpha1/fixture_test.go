package v1alpha1_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/util/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// fixture is one document of a YAML file, as bytes and as the tree that an API server would see.
type fixture struct {
	yaml []byte
	tree map[string]any
}

func (f fixture) kind() string {
	kind, _ := f.tree["kind"].(string)
	return kind
}

// fixtures reads all documents of all files that match the patterns. A pattern without a match fails the test.
func fixtures(t *testing.T, patterns ...string) map[string]fixture {
	t.Helper()

	found := map[string]fixture{}
	for _, pattern := range patterns {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no file matches %s (error: %v)", pattern, err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for i, doc := range documents(t, content) {
				found[fmt.Sprintf("%s#%d", file, i)] = fixture{yaml: doc, tree: tree(t, doc)}
			}
		}
	}
	return found
}

func documents(t *testing.T, content []byte) [][]byte {
	t.Helper()

	var docs [][]byte
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		doc, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return docs
		}
		if err != nil {
			t.Fatal(err)
		}
		docs = append(docs, doc)
	}
}

func tree(t *testing.T, doc []byte) map[string]any {
	t.Helper()

	asJSON, err := yaml.YAMLToJSONStrict(doc)
	if err != nil {
		t.Fatalf("%v in:\n%s", err, doc)
	}
	var out map[string]any
	if err := json.Unmarshal(asJSON, &out); err != nil {
		t.Fatal(err)
	}
	return out
}
