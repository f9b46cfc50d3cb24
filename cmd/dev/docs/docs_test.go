package docs

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../../.."

// A row of the map: a behaviour, the file that has it, and the function, method or type there.
var mapRow = regexp.MustCompile("(?m)^\\| (.+) \\| `([^`]+\\.go)` \\| `([^`]+)` \\|$")

func TestMapNamesWhatIsThere(t *testing.T) {
	t.Parallel()
	rows := mapRow.FindAllStringSubmatch(read(t, "ARCHITECTURE.md"), -1)
	if len(rows) < 40 {
		t.Fatalf("found %d rows of the map in ARCHITECTURE.md, want at least 40: has the form of the table changed?", len(rows))
	}
	declared := map[string]map[string]bool{}
	for _, row := range rows {
		behaviour, file, name := row[1], row[2], row[3]
		if declared[file] == nil {
			declared[file] = declarations(t, file)
		}
		if !declared[file][name] {
			t.Errorf("ARCHITECTURE.md: %q: %s declares no %s", behaviour, file, name)
		}
	}
}

// declarations returns the functions, methods ("Type.Method") and types of a file; none for a file that is not there.
func declarations(t *testing.T, file string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Errorf("ARCHITECTURE.md names %s: %v", file, err)

		return names
	}
	for _, declaration := range parsed.Decls {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				name = receiver(d.Recv.List[0].Type) + "." + name
			}
			names[name] = true
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if s, ok := spec.(*ast.TypeSpec); ok {
					names[s.Name.Name] = true
				}
			}
		}
	}

	return names
}

// receiver returns the name of a method's type, without a pointer's star and type parameters.
func receiver(expr ast.Expr) string {
	switch e := expr.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	default:
		return ""
	}
}

var (
	code     = regexp.MustCompile("`[^`]*`")
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading  = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	unlinked = regexp.MustCompile(`[^\p{L}\p{N}\-_ ]`)
)

func TestLinksLeadSomewhere(t *testing.T) {
	t.Parallel()
	for _, document := range files(t, ".", ".md") {
		prose, _ := parts(read(t, document))
		for _, found := range link.FindAllStringSubmatch(code.ReplaceAllString(prose, ""), -1) {
			target, anchor, _ := strings.Cut(found[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			path := document
			if target != "" {
				path = filepath.Join(filepath.Dir(document), target)
			}
			if _, err := os.Stat(filepath.Join(root, path)); err != nil {
				t.Errorf("%s links to %s: %v", document, found[1], err)
			} else if anchor != "" && !anchors(t, path)[anchor] {
				t.Errorf("%s links to %s: %s has no such heading", document, found[1], path)
			}
		}
	}
}

// anchors returns the anchors that GitHub gives the headings of a document.
func anchors(t *testing.T, document string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	prose, _ := parts(read(t, document))
	for _, found := range heading.FindAllStringSubmatch(prose, -1) {
		text := unlinked.ReplaceAllString(strings.ToLower(found[1]), "")
		all[strings.ReplaceAll(text, " ", "-")] = true
	}

	return all
}

// parts separates a document's text from its code blocks, each of which begins with its language in a line of its own.
func parts(document string) (prose string, blocks []string) {
	for i, part := range strings.Split(document, "```") {
		if i%2 == 0 {
			prose += part
		} else {
			blocks = append(blocks, part)
		}
	}

	return prose, blocks
}

func TestDriverOfREADMECompiles(t *testing.T) {
	t.Parallel()
	_, blocks := parts(read(t, "README.md"))
	first := slices.IndexFunc(blocks, func(block string) bool { return strings.HasPrefix(block, "go\npackage main\n") })
	if first < 0 {
		t.Fatal("README.md shows no driver: a block of Go that begins with package main")
	}
	driver := strings.TrimPrefix(blocks[first], "go\n")
	if lines := strings.Count(driver, "\n"); lines > 40 {
		t.Errorf("the driver of README.md has %d lines, want a screen of them", lines)
	}
	dir := t.TempDir()
	source, overlay := filepath.Join(dir, "main.go"), filepath.Join(dir, "overlay.json")
	// The package is in the module, so that it has the module's versions, and in no folder.
	pkg, err := filepath.Abs(filepath.Join(root, "cmd", "dev", "docs", "readme"))
	if err != nil {
		t.Fatal(err)
	}
	replaced, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(pkg, "main.go"): source}})
	if err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string][]byte{source: []byte(driver), overlay: replaced} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay, "-o", filepath.Join(dir, "driver"), "./cmd/dev/docs/readme")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Errorf("the driver of README.md does not compile: %v\n%s", err, out)
	}
}

var patchedClass = regexp.MustCompile(`"class":\{"name":"([^"]+)"`)

func TestStepsUseClassesOfTheExamples(t *testing.T) {
	t.Parallel()
	examples := strings.Builder{}
	for _, example := range files(t, "deploy/examples", ".yaml") {
		examples.WriteString(read(t, example) + "\n---\n")
	}
	steps := 0
	for _, document := range files(t, ".", ".md") {
		for _, found := range patchedClass.FindAllStringSubmatch(read(t, document), -1) {
			steps++
			if !strings.Contains(examples.String(), "kind: MachineClass\nmetadata:\n  name: "+found[1]+"\n") {
				t.Errorf("%s moves a pool to the class %s, which no file of deploy/examples has", document, found[1])
			}
		}
	}
	if steps == 0 {
		t.Error("no document moves a pool to another class: has the form of that step changed?")
	}
}

// files returns the files of a folder whose names end so, relative to the module's root.
func files(t *testing.T, folder, extension string) []string {
	t.Helper()
	var all []string
	err := fs.WalkDir(os.DirFS(root), folder, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == ".git" || entry.Name() == ".out" || entry.Name() == "node_modules"):
			return fs.SkipDir
		case filepath.Ext(path) == extension:
			all = append(all, path)
		}

		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}

// TestEventsAreExplained has a row for each reason of an Event that mcm/machine records, and no other.
func TestEventsAreExplained(t *testing.T) {
	t.Parallel()
	const folder = "mcm/machine"
	recorders := []string{"sayf", "warnf", "sayAfterWritef", "warnAfterWritef", "warnPreservedDrain", "operationFailed", "announce", "Event", "Eventf"}
	reason := regexp.MustCompile(`^"([A-Z][A-Za-z]+)"$`)
	recorded := map[string]bool{}
	for _, file := range files(t, folder, ".go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		add := func(value ast.Expr) {
			literal, ok := value.(*ast.BasicLit)
			if !ok {
				return
			}
			if found := reason.FindStringSubmatch(literal.Value); found != nil {
				recorded[found[1]] = true
			}
		}
		ast.Inspect(parsed, func(node ast.Node) bool {
			switch n := node.(type) {
			case *ast.CallExpr:
				if method, ok := n.Fun.(*ast.SelectorExpr); ok && slices.Contains(recorders, method.Sel.Name) {
					for _, argument := range n.Args {
						add(argument)
					}
				}
			case *ast.ValueSpec:
				for i, name := range n.Names {
					if strings.HasPrefix(name.Name, "Event") && i < len(n.Values) {
						add(n.Values[i])
					}
				}
			}

			return true
		})
	}
	explained := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Za-z]+)` \\|").FindAllStringSubmatch(read(t, folder+"/EVENTS.md"), -1) {
		explained[row[1]] = true
	}
	if diff := cmp.Diff(recorded, explained); diff != "" || len(recorded) < 30 {
		t.Errorf("%d reasons are recorded; EVENTS.md (-recorded +explained):\n%s", len(recorded), diff)
	}
}
