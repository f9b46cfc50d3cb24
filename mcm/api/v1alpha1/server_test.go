package v1alpha1_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/yaml"

	"github.com/machinebus/machinebus/mcm/kubetest"
)

const (
	// bounded is how long anything here may take; it is far above what is waited for.
	bounded = time.Minute
	// testdataOld holds objects that the rules refuse. They were stored before there were any.
	testdataOld = "testdata/before-rules/*.yaml"
)

// apiServer is a client of an API server with the generated CRDs. Its storage holds objects from before the CRDs had
// rules.
var apiServer client.Client

func TestMain(m *testing.M) {
	env := &envtest.Environment{}
	kubetest.Main(m, env, func(cfg *rest.Config) (err error) {
		if apiServer, err = client.New(cfg, client.Options{Scheme: kubetest.Scheme()}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), bounded)
		defer cancel()

		return makeHistory(ctx, env)
	})
}

// makeHistory installs the CRDs as they were without rules, stores what only those take, and upgrades to the CRDs as
// they are.
func makeHistory(ctx context.Context, env *envtest.Environment) error {
	files, err := filepath.Glob(filepath.Join(crdDir, "*.yaml"))
	if err != nil {
		return err
	}
	var now, before []*apiextensionsv1.CustomResourceDefinition
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(content, crd); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		now = append(now, crd)
		old := crd.DeepCopy()
		withoutRules(old.Spec.Versions[0].Schema.OpenAPIV3Schema)
		before = append(before, old)
	}
	if _, err := envtest.InstallCRDs(env.Config, envtest.CRDInstallOptions{CRDs: before}); err != nil {
		return err
	}
	olds, err := oldObjects()
	if err != nil {
		return err
	}
	for _, o := range olds {
		if err := apiServer.Create(ctx, o); err != nil {
			return err
		}
	}
	if _, err := envtest.InstallCRDs(env.Config, envtest.CRDInstallOptions{CRDs: now}); err != nil {
		return err
	}

	return untilRules(ctx, olds)
}

// untilRules waits until the API server would refuse each of the objects if it were new.
func untilRules(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, o := range objects {
		var last error
		err := wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			fresh := &unstructured.Unstructured{Object: runtime.DeepCopyJSON(o.Object)}
			fresh.SetName(o.GetName() + "-again")
			fresh.SetResourceVersion("")
			last = apiServer.Create(ctx, fresh, client.DryRunAll)

			return apierrors.IsInvalid(last), nil
		})
		if err != nil {
			return fmt.Errorf("no rule refuses %s %s, the last answer is: %w", o.GetKind(), o.GetName(), errors.Join(last, err))
		}
	}

	return nil
}

// withoutRules takes the rules out of a schema.
func withoutRules(s *apiextensionsv1.JSONSchemaProps) {
	s.XValidations = nil
	for name, property := range s.Properties {
		withoutRules(&property)
		s.Properties[name] = property
	}
	if s.Items != nil && s.Items.Schema != nil {
		withoutRules(s.Items.Schema)
	}
	if s.AdditionalProperties != nil && s.AdditionalProperties.Schema != nil {
		withoutRules(s.AdditionalProperties.Schema)
	}
}

func oldObjects() ([]*unstructured.Unstructured, error) {
	files, err := filepath.Glob(testdataOld)
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no file matches %s", testdataOld)
	}
	var all []*unstructured.Unstructured
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		o := &unstructured.Unstructured{}
		if err := yaml.UnmarshalStrict(content, &o.Object); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, o)
	}

	return all, nil
}
