package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk/external"
)

// callLimit bounds a client's unary calls.
const callLimit = 10 * time.Second

// An oldProvider is a driver of 2018 for the virtual cloud. It knows nothing of a bus.
type oldProvider struct {
	data external.MachineClassDataProvider
}

// An oldClass is decoded as the clients of 2018 decoded an AWSMachineClass.
type oldClass struct {
	Spec struct {
		Endpoint    string            `json:"endpoint"`
		MachineType string            `json:"machineType"`
		Region      string            `json:"region"`
		Tags        map[string]string `json:"tags"`
		SecretRef   struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"secretRef"`
	} `json:"spec"`
}

type oldSecret struct {
	Data map[string][]byte `json:"data"`
}

// classData asks for class and secret, as the clients of 2018 did in each call.
func (p *oldProvider) classData(meta *external.MachineClassMeta) (*oldClass, *oldSecret, *cloudapi.Client, error) {
	text, err := p.data.GetMachineClass(meta)
	if err != nil {
		return nil, nil, nil, err
	}
	class, secret := &oldClass{}, &oldSecret{}
	if err := json.Unmarshal([]byte(text.(string)), class); err != nil {
		return nil, nil, nil, err
	}
	data, err := p.data.GetSecret(&external.SecretMeta{
		SecretName: class.Spec.SecretRef.Name, SecretNameSpace: class.Spec.SecretRef.Namespace, Revision: 1,
	})
	if err != nil {
		return nil, nil, nil, err
	}
	if err := json.Unmarshal([]byte(data), secret); err != nil {
		return nil, nil, nil, err
	}
	cloud, err := cloudapi.NewClient(class.Spec.Endpoint, string(secret.Data["apiToken"]))

	return class, secret, cloud, err
}

func (p *oldProvider) Create(meta *external.MachineClassMeta, _, _, machineName string) (id, node string, err error) {
	class, secret, cloud, err := p.classData(meta)
	if err != nil {
		return "Error", "Error", err
	}
	made, err := cloud.Create(context.Background(), cloudapi.CreateRequest{
		Name: machineName, MachineType: class.Spec.MachineType, Region: class.Spec.Region, Tags: class.Spec.Tags,
		UserData: secret.Data["userData"], Identity: cloudapi.IdentityNone,
	})
	if err != nil {
		return "Error", "Error", err
	}

	return made.ProviderID, made.NodeName, nil
}

func (p *oldProvider) Delete(meta *external.MachineClassMeta, _, machineID string) error {
	_, _, cloud, err := p.classData(meta)
	if err != nil {
		return err
	}
	err = cloud.Delete(context.Background(), machineID[strings.LastIndex(machineID, "/")+1:])
	if cloudapi.CodeOf(err) == cloudapi.CodeNotFound {
		return errors.New("machine codes error: code = [NotFound] message = [no such instance]")
	}

	return err
}

func (p *oldProvider) List(meta *external.MachineClassMeta, _, _ string) (map[string]string, error) {
	class, _, cloud, err := p.classData(meta)
	if err != nil {
		return nil, err
	}
	instances, err := cloud.List(context.Background(), cloudapi.Filter{Tags: class.Spec.Tags})
	names := map[string]string{}
	for _, i := range instances {
		names[i.ProviderID] = i.Name
	}

	return names, err
}

// oldConnection dials the bridge as the clients' mains did.
func oldConnection(address string) (*grpc.ClientConn, error) {
	creds := insecure.NewCredentials()
	if prefix := os.Getenv(caVariable); prefix != "" {
		pair, err := tls.LoadX509KeyPair(prefix+".crt", prefix+".key")
		if err != nil {
			return nil, err
		}
		pem, err := os.ReadFile(prefix + "-ca.crt")
		if err != nil {
			return nil, err
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		creds = credentials.NewTLS(&tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}, MaxVersion: tls.VersionTLS12})
	}

	return grpc.NewClient(address, grpc.WithTransportCredentials(creds))
}

// runClient is a client's main.
func runClient(serve func(context.Context, *grpc.ClientConn, string) error) error {
	conn, err := oldConnection(os.Getenv(addressVariable))
	if err != nil {
		return err
	}
	err = serve(context.Background(), conn, os.Getenv(kindVariable))

	return fmt.Errorf("the stream has ended: %w", err)
}

// oldError is an error on the wire of 2018.
func oldError(err error) string {
	if err == nil {
		return ""
	}

	return err.Error()
}
