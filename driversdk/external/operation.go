package external

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/driversdk"
)

// An operation is what the provider is asked for, with all that it may ask for meanwhile.
type operation struct {
	ctx         context.Context // ends when the operation is over for the manager
	provider    ExternalDriverProvider
	class       *MachineClassMeta
	credentials string
	secret      driversdk.SecretReference // the zero value for none

	classJSON, secretJSON string
}

func (d *Driver) operation(
	ctx context.Context, class *driversdk.Class[json.RawMessage], userData []byte,
) (*operation, error) {
	op := &operation{ctx: ctx, provider: d.provider, secret: secretOf(class)}
	if p, ok := d.provider.(ContextProvider); ok {
		op.provider = p.WithContext(ctx)
	}
	op.class = &MachineClassMeta{Name: d.classType.path(class.Namespace, class.Name), Revision: revision(class)}
	var err error
	if op.classJSON, err = classJSON(d.classType, class, op.secret); err != nil {
		return nil, driversdk.Errorf(driversdk.InvalidArgument, "class %s/%s: %w", class.Namespace, class.Name, err)
	}
	if op.secret.Name == "" {
		return op, nil
	}
	op.credentials = op.secret.Namespace + "/" + op.secret.Name
	if op.secretJSON, err = secretJSON(class.Secret, userData, op.secret); err != nil {
		return nil, driversdk.Errorf(driversdk.Internal, "secret %s: %w", op.credentials, err)
	}

	return op, nil
}

func (o *operation) list() (map[string]string, error) {
	names, err := o.provider.List(o.class, o.credentials, "")

	return names, coded(err)
}

// find returns the provider ids of the instances with a machine's name.
func (o *operation) find(machine string) ([]string, error) {
	names, err := o.list()
	maps.DeleteFunc(names, func(_, name string) bool { return name != machine })

	return slices.Sorted(maps.Keys(names)), err
}

// path is where the API server of 2018 had the class.
func (t ClassType) path(namespace, name string) string {
	return fmt.Sprintf("/apis/%s/namespaces/%s/%ses/%s", t.APIVersion, namespace, strings.ToLower(t.Kind), name)
}

// secretOf returns the one secret that a class of 2018 refers to.
func secretOf(class *driversdk.Class[json.RawMessage]) driversdk.SecretReference {
	if class.SecretRef.Name != "" {
		return class.SecretRef
	}

	return class.CredentialsSecretRef
}

// revision is different for each version of a class and its secrets.
func revision(class *driversdk.Class[json.RawMessage]) int32 {
	hash := fnv.New32a()
	for _, version := range []string{
		class.UID, class.ResourceVersion,
		class.SecretRef.UID, class.SecretRef.ResourceVersion,
		class.CredentialsSecretRef.UID, class.CredentialsSecretRef.ResourceVersion,
	} {
		fmt.Fprintf(hash, "%q", version)
	}

	return max(1, int32(hash.Sum32()&0x7fffffff)) // some clients of 2018 take 0 for none
}
